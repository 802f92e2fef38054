"""Makes the optimizer of a configuration from its expression."""

from __future__ import annotations

import ast
import builtins
import importlib
from typing import Any

from torch import nn

from .listed import Configuration


def build(configuration: Configuration, net: nn.Module) -> Any:
    """The optimizer of `net`. Imports what the expression names."""
    parameters = list(net.parameters())
    names: dict[str, Any] = {
        "net": net,
        "p": parameters,
        "named": list(net.named_parameters()),
        "matrices": [each for each in parameters if each.dim() == 2],
        "rest": [each for each in parameters if each.dim() != 2],
    }
    for statement in configuration.setup:
        exec(statement, _with_imports(statement, names))
    return eval(configuration.expression, _with_imports(configuration.expression, names))


def _with_imports(source: str, names: dict[str, Any]) -> dict[str, Any]:
    found = dict(names)
    nodes = list(ast.walk(ast.parse(source)))
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        path = _dotted(node)
        if path and path[0] not in made and path[0] not in names and not hasattr(builtins, path[0]):
            found[path[0]] = _import_along(path)
    return found


def _dotted(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return [*before, node.attr] if before else []
    return []


def _import_along(path: list[str]) -> Any:
    """Import as much of a dotted path as are modules; returns the first."""
    for end in range(1, len(path) + 1):
        name = ".".join(path[:end])
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if end == 1 or error.name != name:
                raise
            break
    return importlib.import_module(path[0])
