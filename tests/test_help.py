"""What `--help` prints is plain text: no markup of docstrings."""

from __future__ import annotations

import pytest

from ddp_crossover import cli


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
