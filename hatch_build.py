"""What an index shows of the package: addresses, and README with links that lead somewhere. For hatchling."""

import os
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAPERS = {
    "DeAR (paper)": "https://arxiv.org/abs/2302.12445",
    "CrossoverScheduler (paper)": "https://arxiv.org/abs/2103.07974",
}
# Where the repository is kept is not written in it: the workflow that publishes it knows. See release.yml.
REPOSITORY_VARIABLE = "DDP_CROSSOVER_URL"


class IndexPage(MetadataHookInterface):
    """Adds `project.urls` and `project.readme`."""

    def update(self, metadata: dict) -> None:  # type: ignore[type-arg]
        """Papers always; pages of the repository where its address is known."""
        metadata["urls"] = dict(PAPERS)
        readme = Path(self.root, "README.md").read_text()
        if repository := os.environ.get(REPOSITORY_VARIABLE, "").rstrip("/"):
            metadata["urls"] |= {
                "Source": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
            }
            readme = readme.replace("](docs/", f"]({repository}/blob/main/docs/")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
