"""A few optimizers of packages that the tests install in every run; all of the list in `-m nightly`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from .campaign import campaign
from .installed import install, missing
from .listed import LOOPS, Configuration, read
from .report import NOT_COUNTED, counts, failures, table

MODES = ("default", "shards")
FEW = {
    "torch": "torch.optim.AdamW(p)",
    "schedulefree": "schedulefree.AdamWScheduleFree(p)",
    "pytorch_optimizer": "pytorch_optimizer.AdamP(p)",
    "timm": "timm.optim.Lookahead(torch.optim.SGD(p, lr=0.1, momentum=0.9), k=3)",
}
# Counts how often a configuration is built: by plain DDP, then attached, then, if they differ, by plain DDP again.
COUNTED = ("torch.builds = getattr(torch, 'builds', 0) + 1",)
WRONG = Configuration("none==0", "torch.optim.SGD(p, lr=0.2 if torch.builds == 2 else 0.1)", setup=COUNTED)
ENDS = {
    "wrong": WRONG,
    "crash": WRONG._replace(expression="torch.optim.SGD(p, lr=-1.0 if torch.builds == 2 else 0.1)"),
    "plain does not repeat": WRONG._replace(expression="torch.optim.SGD(p, lr=0.1 * torch.builds)"),
    "plain fails": WRONG._replace(expression="torch.optim.SGD(p, lr=-1.0)"),
    "refused": WRONG._replace(expression="torch.optim.LBFGS(p)", loop="closure"),
}


def test_the_list_has_pinned_packages_and_150_configurations() -> None:
    requirements, configurations = read()
    assert len(configurations) >= 150
    assert [each for each, times in Counter(map(str, configurations)).items() if times > 1] == []
    assert {each.loop for each in configurations} <= set(LOOPS)
    names = [each.partition("==")[0] for each in requirements]
    assert [each for each, times in Counter(names).items() if times > 1] == []


def test_a_line_without_a_version_is_named(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("torch==2.14.1\n    torch.optim.AdamW(p)\nschedulefree\n")
    with pytest.raises(ValueError, match=r"list\.txt, line 3: 'schedulefree' has no version"):
        read(file)


@pytest.mark.timeout(300)
def test_optimizers_of_packages_that_are_here_agree_with_plain_ddp() -> None:
    for package in FEW:
        pytest.importorskip(package)
    loops = {"schedulefree": "train"}
    few = [Configuration(f"{name}==0", text, loops.get(name, "plain")) for name, text in FEW.items()]
    results = campaign(few, MODES)
    assert not failures(results), "\n".join(failures(results))
    by_package = {result.configuration.package: result.verdicts["default"].kind for result in results}
    assert by_package["torch"] == "deferred"
    assert not set(by_package.values()) & {*NOT_COUNTED, "refused"}


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("packages")
@pytest.mark.parametrize("kind", ENDS)
def test_each_end_is_told_from_the_others(kind: str) -> None:
    (result,) = campaign([ENDS[kind]], ("default",))
    verdict = result.verdicts["default"]
    assert verdict.kind == kind, verdict.detail
    assert bool(failures([result])) == (kind in ("wrong", "crash"))


@pytest.mark.timeout(300)
def test_what_breaks_in_one_mode_leaves_the_others_and_the_next() -> None:
    breaks = ENDS["crash"]
    (first, second) = campaign([breaks, Configuration("none==0", FEW["torch"])], MODES)
    assert [verdict.kind for verdict in first.verdicts.values()] == ["crash", "crash"]  # fresh ranks count anew
    assert [verdict.kind for verdict in second.verdicts.values()] == ["deferred", "deferred"]


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_optimizers_of_packages_agree_with_plain_ddp(tmp_path: Path) -> None:
    requirements, configurations = read()
    needed = missing(requirements)
    failed = install(needed, tmp_path)
    if needed and len(failed) == len(needed):
        pytest.skip(f"no package can be installed: {next(iter(failed.values()))}")
    results = campaign(configurations, MODES, site=str(tmp_path))
    print(table(results, MODES))
    assert not failures(results), "\n".join(failures(results))
    trained = len(results) - sum(counts(results, "default")[kind] for kind in NOT_COUNTED)
    assert trained >= 150, table(results, MODES)
