"""The list of packages and of configurations of their optimizers, as `optimizers.txt` has them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("optimizers.txt")
LOOPS = ("plain", "closure", "sam", "train", "train_late")


class Configuration(NamedTuple):
    """An optimizer with its settings.

    Attributes:
        requirement: package and version, as pip takes them.
        expression: Python that makes the optimizer; see `optimizers.txt` for the names that it may use.
        loop: how a script trains with it, of `LOOPS`.
        setup: statements to run first.
    """

    requirement: str
    expression: str
    loop: str = "plain"
    setup: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Its name, without a version."""
        return self.requirement.partition("==")[0]

    def __str__(self) -> str:
        prefix = "" if self.loop == "plain" else f"{self.loop}: "
        return f"{self.package}: {prefix}{self.expression}"


class Listed(NamedTuple):
    """What the list holds."""

    requirements: tuple[str, ...]
    configurations: tuple[Configuration, ...]


def read(file: Path = FILE) -> Listed:
    """Read the list; a ValueError names the line that is not understood."""
    requirements: list[str] = []
    configurations: list[Configuration] = []
    setup: list[str] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        text = line.split("  #")[0].strip()
        if not text or text.startswith("#"):
            continue
        if not line[0].isspace():
            if "==" not in text:
                raise ValueError(f"{file.name}, line {number}: {text!r} has no version: write name==version")
            requirements.append(text)
            setup = []
        elif text.startswith("!"):
            setup.append(text[1:].strip())
        else:
            configurations.append(_configuration(requirements[-1], text, tuple(setup)))
    return Listed(tuple(requirements), tuple(configurations))


def _configuration(requirement: str, text: str, setup: tuple[str, ...]) -> Configuration:
    loop, colon, rest = text.partition(": ")
    if colon and loop in LOOPS:
        return Configuration(requirement, rest, loop, setup)
    return Configuration(requirement, text, setup=setup)
