"""What makes the host wait for a GPU does not come into code of every step unnoticed.

The virtual GPU sees more, as lists behind a name, but only in what a test runs on it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ddp_crossover

PACKAGE = Path(ddp_crossover.__file__).parent
OF_EVERY_STEP = (
    "hook",
    "step",
    "watching",
    "pipeline",
    "pending",
    "nccl",
    "comm",
    "addons/codes",
    "addons/norms",
    "addons/relaxed",
    "addons/shards",
    "addons/weights",
)
# Numbers of Python become a tensor, or one becomes a number. Whoever is allowed to, by the file and the function.
ALLOWED = {
    ("comm/agreement.py", "all_gather_json"): "at attach and for new plans",
    ("comm/gloo_link.py", "exchange_numbers"): "gloo, on the host",
    ("nccl/nccl_link.py", "exchange_numbers"): "between hosts",
    ("addons/weights/weighted_training.py", "_least_and_most"): "once per epoch",
    ("addons/codes/feedback.py", "begin_step"): "makes one of a number only on the CPU",
    ("addons/norms/grad_scaler.py", "agreed"): "torch's GradScaler waits there, too",
    ("watching/clone.py", "_state_of_sample"): "at attach",
    ("watching/separability.py", "closure"): "at attach",
    ("watching/separability.py", "_calls_closure"): "at attach",
    ("addons/shards/shard_states.py", "_scalar"): "loads a checkpoint",
    ("addons/shards/shard_states.py", "_description"): "writes a checkpoint",
}


def blocking_places(source: str) -> Iterator[tuple[str, str]]:
    """The function and the expression of each place that would block."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if _blocks(node):
                    yield function.name, ast.unparse(node)


def _blocks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        return node.func.attr in ("item", "new_tensor") or (of_torch and node.func.attr in ("tensor", "as_tensor"))
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) != "Callable":
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return any(isinstance(index, ast.List | ast.ListComp) for index in indices)
    return False


def test_no_new_place_makes_the_host_wait() -> None:
    files = [PACKAGE / "dear.py", PACKAGE / "comm_hook.py", PACKAGE / "composition.py"]
    files += [file for name in OF_EVERY_STEP for file in sorted((PACKAGE / name).rglob("*.py"))]
    found = {
        (str(file.relative_to(PACKAGE)), function): expression
        for file in files
        for function, expression in blocking_places(file.read_text())
    }
    new = {place: expression for place, expression in found.items() if place not in ALLOWED}
    assert not new, f"the host would wait for the device in {new}: let a kernel do it, or say here why it may"
    assert ALLOWED.keys() <= found.keys(), f"no longer there: {ALLOWED.keys() - found.keys()}"
