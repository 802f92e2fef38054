"""What ``optimizer.state`` is while the state is spread over the ranks: any look raises, and says what to do."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

CONSOLIDATE = (
    "the state of this optimizer is spread over the ranks (shard_optimizer=True): call state.consolidate() on all "
    "ranks first, with the DearState that attach() returned, and while its model lives"
)


class ShardedState(defaultdict[Any, Any]):
    """Stands for a state that is elsewhere. Always empty inside."""

    def __init__(self) -> None:
        super().__init__(dict)


def _refuse(self: ShardedState, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(CONSOLIDATE)


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__setitem__", "__bool__"),
    *("__reduce__", "__copy__", "__deepcopy__", "__missing__"),
    *("clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(ShardedState, _name, _refuse)
ShardedState.__repr__ = lambda self: f"<{CONSOLIDATE}>"  # type: ignore[method-assign]
ShardedState.__hash__ = None
