"""Base class of objects that a user's module refers to, as its hooks do, and that must not be copied with it."""

from __future__ import annotations

from typing import Any, NoReturn

PICKLE_ADVICE = (
    "a model with dear_hook attached cannot be pickled: save ddp.module.state_dict(), or call state.detach() first"
)


class Hook:
    """A hook that is not copied with its module, and that raises on pickling, with advice what to do instead."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return _Nothing()

    def __reduce__(self) -> NoReturn:
        raise TypeError(PICKLE_ADVICE)


class _Nothing(Hook):
    """Stands for a hook in a copy of a module, and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None
