"""An object changes its own attributes only. What belongs to torch or to Python, and is changed, is on a short list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "ddp_crossover"

NOT_OURS = {
    "set_stream": "torch.cuda's, which tells of streams that scripts switch to",
    "shutdown": "dist.ProcessGroup's, before which memory is deregistered",
    "cta_policy": "of options for a process group that is about to be made",
    "_timeout": "of the same",
    "grad": "of a parameter",
    "requires_grad": "of a frozen parameter, as long as DDP puts its hooks on all",
    "state": "of an optimizer",
    "param_groups": "of an optimizer",
    "__class__": "of a parameter whose value is pending",
    "__dict__": "of memory that stands for a parameter",
    "n_averaged": "of torch's AveragedModel",
    "backward": "torch.autograd's, recorded by verify",
    "scale": "GradScaler's, which tells by what a loss was multiplied",
    "_check_scale_growth_tracker": "GradScaler's, which a rank without data asks before any loss",
    "compile_frame": "dynamo's, before which pending values are made plain",
    "safe_grad": "dynamo's description of a gradient",
    "_static_graph_delay_allreduce_enqueued": "DDP's",
    "atexit": "of weakref.finalize",
    "raiseExceptions": "of logging, in the broker's process",
    "exec_module": "of a module's loader",
    "cell_contents": "of a variable of an enclosing function, which a deferred update finds as it was at step()",
    "__code__": "of a function that was made here",
    "__exit__": "record_function's, which no signal handler may interrupt half-way",
}


def _targets(node: ast.AST) -> Iterator[ast.Attribute]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(one, ast.Attribute):
                yield one


def _made_here(function: ast.AST) -> set[str]:
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def writes_to_others(source: str) -> list[tuple[int, str, str]]:
    """Line, target and attribute of each assignment to an object that is neither `self` nor made in the function."""
    found = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        own = {"self", "cls", *_made_here(function)}
        for node in ast.walk(function):
            for target in _targets(node):
                if not (isinstance(target.value, ast.Name) and target.value.id in own):
                    found[target.lineno, target.col_offset] = (target.lineno, ast.unparse(target), target.attr)
    return sorted(found.values())


def test_nobody_writes_to_the_attributes_of_another_object() -> None:
    strange, known = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, target, attribute in writes_to_others(path.read_text()):
            known.add(attribute)
            if attribute not in NOT_OURS:
                strange.append(f"{path.relative_to(PACKAGE)}:{line} {target}")
    assert not strange, "give the object a method that is named for what happens to it"
    assert known == set(NOT_OURS), "the list names what nobody writes"


def test_the_rule_sees_each_way_to_write() -> None:
    source = """
def f(self, other, pair):
    self.own = 1
    made = Thing()
    made.part = 2
    other.a = 3
    other.b += 4
    self.other.c: int = 5
    self.d, other.e = pair
"""
    assert [target for _, target, _ in writes_to_others(source)] == ["other.a", "other.b", "self.other.c", "other.e"]
