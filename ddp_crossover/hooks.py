"""What everything has in common that is hung on a user's module."""

from __future__ import annotations

from typing import Any, NoReturn

PICKLE_ADVICE = (
    "a model with dear_hook attached cannot be pickled: save ddp.module.state_dict(), or call state.detach() first"
)


class Hook:
    """Never copied along with its module, and pickling it tells the way out."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return _Nothing()

    def __reduce__(self) -> NoReturn:
        raise TypeError(PICKLE_ADVICE)


class _Nothing(Hook):
    """What a hook becomes in a copy of a module."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None
