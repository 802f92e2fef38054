"""Which small changes of the core do the tests not notice? Each one is a missing test, or code that nobody needs.

    python -m tests.mutants --seed 1 --count 60 [--json FILE]

Draws changes of one place each, and for each runs in a copy of the checkout, until something fails: the programs that
have failed once, the day's tests of the room, each feature by itself. `--whole` runs all of the day's tests on what has
survived.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CORE = (
    "comm_hook.py", "dear.py", "fusion.py", "hook", "step", "watching", "pipeline", "pending", "comm", "nccl", "plan",
    "addons/shards", "addons/codes", "addons/weights", "addons/norms",
)  # fmt: skip
OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
STAGE_S = 900.0


class Mutant(NamedTuple):
    """A change of one place: `old` becomes `new` at `start` in the text of `file`, which is `line`."""

    file: str
    line: int
    start: int
    old: str
    new: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes of a file: comparisons, `and` and `or`, `not`, numbers, and statements that are left out."""
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assert text.isascii(), "offsets of ast count bytes"
    for node in ast.walk(ast.parse(text)):
        for new in _changes(node):
            assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, start, text[start:stop], new)


def _changes(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            yield f"({ast.unparse(ast.Compare(node.left, [OPPOSITE[type(op)]()], node.comparators))})"  # type: ignore[list-item]
        case ast.BoolOp():
            yield f"({ast.unparse(ast.BoolOp(OPPOSITE[type(node.op)](), node.values))})"  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not()):
            yield f"bool({ast.unparse(node.operand)})"
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            yield str(number + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute()]):
            yield "pass"


def outcome(mutant: Mutant, copy: Path, stages: list[list[str]]) -> str:
    """What kills it: the name of the first stage that fails, with the first test that did; empty if none does."""
    path = copy / mutant.file
    text = path.read_text()
    assert text[mutant.start :].startswith(mutant.old)
    path.write_text(text[: mutant.start] + mutant.new + text[mutant.start + len(mutant.old) :])
    try:
        for stage in stages:
            if found := _first_failure(stage, copy):
                return f"{' '.join(stage)}: {found}"
        return ""
    finally:
        path.write_text(text)


def _first_failure(arguments: list[str], copy: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadgroup", *arguments]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=STAGE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "hangs"
    if process.returncode == 0:
        return ""
    failed = [line for line in output.decode().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [f"pytest ended with {process.returncode}"])[0][:160]


def main() -> int:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", help="of those drawn, in files whose path has this in it")
    parser.add_argument("--whole", action="store_true", help="run all of the day's tests on what has survived")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = [path for name in CORE for path in sorted((ROOT / "ddp_crossover" / name).glob("**/*.py"))]
    files += [ROOT / "ddp_crossover" / name for name in CORE if name.endswith(".py")]
    everything = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(arguments.seed).sample(everything, arguments.count)
    ended = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in tracked.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        for number, mutant in enumerate(drawn):
            if arguments.only not in mutant.file:
                continue
            room = Path("tests", *Path(mutant.file).parts[1:-1])
            of_room = [str(room)] if (ROOT / room).is_dir() else ["tests", "--ignore", "tests/fuzz", "-m", "quick"]
            stages = [["tests/fuzz", "-k", "failed_once"], of_room, ["tests/fuzz", "-k", "by_itself"]]
            stages += [["tests"]] if arguments.whole else []
            killer = outcome(mutant, copy, stages)
            print(f"{number:3} {'killed' if killer else 'SURVIVES'} {mutant.file}:{mutant.line} "
                  f"{mutant.old[:80]!r} -> {mutant.new[:80]!r}  {killer}", flush=True)  # fmt: skip
            ended.append(mutant._asdict() | {"killed_by": killer})
            if arguments.json:
                arguments.json.write_text(json.dumps(ended, indent=1))
    survivors = sum(not one["killed_by"] for one in ended)
    print(f"{len(ended) - survivors} of {len(ended)} killed (drawn from {len(everything)}, seed {arguments.seed})")
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main())
