"""The profile of a model as a file: the input of planner and simulator, measured in a run or synthetic.

The JSON document::

    {"parameters": [{"name": "fc.weight", "numel": 1000, "itemsize_bytes": 4, "arena": "float32"}, ...],
     "compute": {"use_s": [...], "arrival_s": [...], "forward_s": 0.05, "backward_s": 0.1, "rest_s": 0.0},
     "link": {"latency_s": 1e-4, "per_leg_s": 3e-5, "s_per_byte": 8.5e-10},
     "world_size": 2,
     "rank_compute_s": [0.15, 0.15]}

``link`` and ``rank_compute_s``, forward and backward of each rank, are optional. ``world_size`` is the number of ranks
with which the link was measured (2 if missing). The optional ``arena`` of a parameter names dtype and device; only
parameters of the same arena travel together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_crossover.fusion import GradientSpec
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel


@dataclass(frozen=True)
class ModelProfile:
    """Sizes and times of one model on one machine.

    Attributes:
        specs: gradients of the model's parameters.
        compute: compute times of a step, one entry per parameter in the order of ``specs``.
        link: the measured link, or None.
        world_size: number of ranks with which the link was measured.
        rank_compute_s: length of forward and backward on each rank; empty if it is not known.
    """

    specs: tuple[GradientSpec, ...]
    compute: ComputeProfile
    link: LinkModel | None = None
    world_size: int = 2
    rank_compute_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.specs) != len(self.compute.use_s):
            raise ValueError(
                f"a profile needs compute times for each parameter: it has {len(self.specs)} parameters and times for "
                f"{len(self.compute.use_s)}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the document for ``json.dump``; :meth:`from_json` reads it."""
        document: dict[str, Any] = {
            "parameters": [asdict(spec) for spec in self.specs],
            "compute": self.compute.to_json(),
            "world_size": self.world_size,
        }
        if self.rank_compute_s:
            document["rank_compute_s"] = list(self.rank_compute_s)
        if self.link is not None:
            document["link"] = self.link.to_json()
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelProfile:
        """The inverse of :meth:`to_json`."""
        return cls(
            specs=tuple(
                GradientSpec(
                    name=str(entry["name"]),
                    numel=int(entry["numel"]),
                    itemsize_bytes=int(entry["itemsize_bytes"]),
                    arena=str(entry.get("arena", f"{entry['itemsize_bytes']} bytes")),
                )
                for entry in document["parameters"]
            ),
            compute=ComputeProfile.from_json(document["compute"]),
            link=LinkModel.from_json(document["link"]) if "link" in document else None,
            world_size=int(document.get("world_size", 2)),
            rank_compute_s=tuple(map(float, document.get("rank_compute_s", ()))),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """Read the JSON document.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the file is not a valid profile.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a profile file ({error!r}): write one with state.profile().save(path)"
            ) from error
