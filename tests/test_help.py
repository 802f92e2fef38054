"""What `--help` prints is plain text: no markup of docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_crossover import cli

SCRIPTS = Path(__file__).parents[1] / "scripts"


def _help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main([*arguments, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [(), *((name,) for name in cli.COMMANDS), ("lease", "top"), ("lease", "status")])
def test_the_help_of_a_command_is_plain_text(command, capsys) -> None:
    shown = _help(capsys, *command)
    assert "usage: " in shown
    assert "`" not in shown


def test_the_help_of_the_lease_says_what_its_exit_status_means(capsys) -> None:
    assert "Exit status" in _help(capsys, "lease")


def _shown_as_help(script: Path) -> Iterator[str]:
    tree = ast.parse(script.read_text())
    if script.parent == SCRIPTS:
        yield ast.get_docstring(tree) or ""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for keyword in call.keywords:
            if keyword.arg in ("help", "description", "epilog"):
                yield ast.unparse(keyword.value)


def test_the_help_of_each_script_is_plain_text() -> None:
    marked = {str(script): text for script in SCRIPTS.rglob("*.py") for text in _shown_as_help(script) if "`" in text}
    assert not marked
