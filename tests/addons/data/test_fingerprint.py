"""Digests of data sets and transforms: equal in every process, and different after every change that counts."""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from ddp_crossover.addons.data.fingerprint import NoFingerprint, fingerprint
from matrix import often
from pictures import make_folder

ROOT = Path(__file__).parents[3]
logger = logging.getLogger(__name__)


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logger.debug("scaled")
        return x * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by


class PrivatelySlotted:
    __slots__ = ("__by",)

    def __init__(self, by: float) -> None:
        self.__by = by


class By(NamedTuple):
    by: float

    def __call__(self, x: float) -> float:
        return x * self.by


class Plus(NamedTuple):
    by: float

    def __call__(self, x: float) -> float:
        return x + self.by


class Rows(list):  # type: ignore[type-arg]
    def __getitem__(self, index: Any) -> Any:
        return 2 * super().__getitem__(index)


def _with_attribute(value: int) -> Any:
    def function(x: int) -> int:
        return x * function.by  # type: ignore[attr-defined]

    function.by = value  # type: ignore[attr-defined]
    return function


def _wrapping(by: int) -> Any:
    @functools.wraps(transforms.functional.hflip)
    def function(x: int) -> int:
        return x * by

    return function


def pairs() -> list[tuple[str, Any, Any]]:
    zeros, ones = torch.zeros(4, 2), torch.ones(4, 2)
    return [
        ("tensors", TensorDataset(zeros), TensorDataset(ones)),
        ("dtypes", TensorDataset(zeros), TensorDataset(zeros.double())),
        ("shapes", TensorDataset(zeros), TensorDataset(zeros.view(4, 1, 2))),
        ("subsets", Subset(TensorDataset(zeros), [0, 1]), Subset(TensorDataset(zeros), [0, 2])),
        ("parts", ConcatDataset([TensorDataset(zeros)]), ConcatDataset([TensorDataset(zeros)] * 2)),
        ("sizes", transforms.Resize(32), transforms.Resize(33)),
        ("filters", transforms.Resize(32), transforms.Resize(32, transforms.InterpolationMode.NEAREST)),
        ("transforms", v2.Resize(32), v2.CenterCrop(32)),
        ("orders", v2.Compose([v2.Resize(9), v2.CenterCrop(8)]), v2.Compose([v2.CenterCrop(8), v2.Resize(9)])),
        ("attributes", Scale(1.0), Scale(2.0)),
        ("slots", Slotted(1.0), Slotted(2.0)),
        ("functions", torch.abs, torch.neg),
        ("ufuncs", np.abs, np.negative),
        ("partials", functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3)),
        ("constants", lambda x: x * 2, lambda x: x * 3),
        ("methods", lambda x: x.lower(), lambda x: x.upper()),
        ("closures", (lambda k: lambda x: x * k)(2), (lambda k: lambda x: x * k)(3)),
        ("inner functions", lambda x: [i * 2 for i in x], lambda x: [i * 3 for i in x]),
        ("sets", {"a", "b"}, {"a", "c"}),
        ("keys", {(1, 2): Scale(1.0)}, {(1, 2): Scale(2.0)}),
        ("paths", Path("a/b"), Path("a/c")),
        ("bytes", b"a", b"b"),
        ("bound methods", Scale(1.0).__call__, Scale(2.0).__call__),
        ("arrays of objects", np.array([None, "a"]), np.array([None, "b"])),
        ("tuples and lists", Scale((0, 1)), Scale([0, 1])),  # type: ignore[arg-type]
        ("types of keys", Scale({1: 2}), Scale({"1": 2})),  # type: ignore[arg-type]
        ("named tuples", By(2.0), Plus(2.0)),
        ("subclasses of lists", Rows([1]), [1]),
        ("private slots", PrivatelySlotted(1.0), PrivatelySlotted(2.0)),
        ("attributes of functions", _with_attribute(1), _with_attribute(2)),
        ("wrapped functions", _wrapping(2), _wrapping(3)),
        ("masks", np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[0, 0])),
        ("times", np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]")),
        ("conjugates", torch.ones(1, dtype=torch.cfloat) * 1j, (torch.ones(1, dtype=torch.cfloat) * 1j).conj()),
        ("patterns", re.compile("a"), re.compile("a", re.IGNORECASE)),
    ]


@pytest.mark.parametrize("index", range(len(pairs())), ids=[name for name, *_ in pairs()])
def test_what_differs_has_another_digest_and_what_is_equal_has_the_same(index) -> None:
    _, one, other = pairs()[index]
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(pairs()[index][1])


def test_files_count_by_size_and_time(tmp_path: Path) -> None:
    make_folder(tmp_path, 4)
    before = fingerprint(ImageFolder(tmp_path))
    assert fingerprint(ImageFolder(tmp_path)) == before
    path = Path(ImageFolder(tmp_path).samples[2][0])
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = fingerprint(ImageFolder(tmp_path))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert touched != before == fingerprint(ImageFolder(tmp_path))
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint(ImageFolder(tmp_path)) != before


def test_many_files_are_asked_for_by_threads_and_count_all_the_same(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(300)]
    for path in paths:
        path.write_text("a")
    texts = [str(path) for path in paths]
    before = fingerprint(texts)
    paths[-1].write_text("ab")
    assert fingerprint(texts) != before


def test_a_file_without_a_directory_in_its_name_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.csv").write_text("1")
    before = fingerprint({"file": "train.csv"})
    Path("train.csv").write_text("12")
    assert fingerprint({"file": "train.csv"}) != before


SCRIPT = """
import functools
from ddp_crossover.addons.data.fingerprint import fingerprint

FACTOR = {factor}

def helper(x):
    {comment}
    return x * FACTOR

class Data:
    names = {{"a", "b", "c"}}

    def __init__(self):
        self.cache = functools.lru_cache(helper)

    def __getitem__(self, index):
        "{doc}"
        return {call}(index)

    def __len__(self):
        return 3

print(fingerprint(Data(), lambda x: helper(x) in {{"a", "b", "c", ...}}))
"""


def _digest(tmp_path: Path, seed: int = 0, **parts: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(**{"factor": "2", "comment": "", "doc": "one", "call": "helper"} | parts))
    env = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.nightly
def test_a_users_script_counts_with_what_its_code_does_and_names(tmp_path: Path) -> None:
    before = _digest(tmp_path)
    assert _digest(tmp_path, seed=1) == before
    assert _digest(tmp_path, comment="# says nothing") == before
    assert _digest(tmp_path, factor="3") != before
    assert _digest(tmp_path, comment="x += 1") != before
    assert _digest(tmp_path, call="abs") != before


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Scale(np.random.default_rng(0)), "Generator"),
        (lambda: Scale(torch.Generator()), "Generator"),
        (lambda: Scale(sys.stdout.buffer), "_io"),
        (lambda: Scale(iter([1])), "iterator"),
        (lambda: torch.zeros(2, 2).to_sparse(), "sparse"),
        (lambda: Scale(random.Random(1)), "random.Random"),  # type: ignore[arg-type]
        (lambda: np.frompyfunc(abs, 1, 1), "frompyfunc"),
    ],
    ids=["generator of numpy", "generator of torch", "file", "iterator", "sparse", "generator of Python", "frompyfunc"],
)
def test_what_keeps_its_state_elsewhere_has_none_and_is_named(make, named) -> None:
    with pytest.raises(NoFingerprint, match=named):
        fingerprint([1, {"a": make()}])


def test_slices_of_a_mapped_file_differ(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.arange(20))
    mapped = np.load(tmp_path / "array.npy", mmap_mode="r")
    slices = [mapped, mapped[:10], mapped[10:], mapped[::2], mapped[1::2]]
    assert len({fingerprint(one) for one in slices}) == len(slices)
    assert fingerprint(mapped[10:]) == fingerprint(np.load(tmp_path / "array.npy", mmap_mode="r")[10:])


@pytest.mark.parametrize("keep", [np.array, dict.fromkeys, lambda paths: [path.encode() for path in paths]])
def test_files_count_wherever_their_names_are_kept(tmp_path: Path, keep) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(b"1")
    before = fingerprint(keep([str(file)]))
    file.write_bytes(b"12")
    assert fingerprint(keep([str(file)])) != before


MODULES = """
import helpers
from ddp_crossover.addons.data.fingerprint import fingerprint

class Data:
    def __getitem__(self, index):
        {code}

for helpers.config.SIZE in (1, 2):
    print(fingerprint(Data()))
"""


@pytest.mark.parametrize(
    "code",
    often(
        [
            "return helpers.decode(index)",
            "from helpers import decode; return decode(index)",
            "return helpers.config.SIZE",
        ],
        "return helpers.config.SIZE",
    ),
)
def test_what_code_uses_of_own_modules_counts(tmp_path: Path, code) -> None:
    def digests(body: str = "return config.SIZE * x") -> list[str]:
        (tmp_path / "config.py").write_text("SIZE = 0\n")
        (tmp_path / "helpers.py").write_text(f"import config\n\ndef decode(x):\n    {body}\n")
        (tmp_path / "script.py").write_text(MODULES.format(code=code))
        command = [sys.executable, "-B", tmp_path / "script.py"]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()

    before = digests()
    assert digests() == before and len({*before}) == 2
    assert (digests("return config.SIZE + x") == before) is ("decode" not in code)


def test_what_refers_to_itself_has_one() -> None:
    one = Scale(1.0)
    one.itself = one  # type: ignore[attr-defined]
    assert fingerprint(one) != fingerprint(Scale(1.0))


def test_a_class_that_inherits_from_installed_ones_counts_with_its_own_code() -> None:
    def make(source: str) -> Any:
        names: dict[str, Any] = {"__name__": "users_module"}
        exec(textwrap.dedent(source), names)
        return names["Mine"]()

    base = (
        "from torchvision.transforms import v2\nclass Mine(v2.Transform):\n    def transform(self, x, params): return "
    )
    assert fingerprint(make(base + "x")) == fingerprint(make(base + "x"))
    assert fingerprint(make(base + "x")) != fingerprint(make(base + "-x"))
