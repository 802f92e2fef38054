"""Host time of the package's own work, function by function, without what other timed functions inside of it take."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


class HostClock:
    """Adds up host time.

    Attributes:
        own_s: for each name, seconds of each call, without calls of other timed functions inside.
    """

    def __init__(self) -> None:
        self.own_s: dict[str, list[float]] = defaultdict(list)
        self._inside = threading.local()  # backward runs on a thread of autograd's

    @contextmanager
    def timing(self, functions: dict[str, tuple[Any, str]]) -> Iterator[None]:
        """Time methods inside of the block.

        Args:
            functions: for each name, a class and the name of its method.
        """
        with ExitStack() as stack:
            for name, (owner, method) in functions.items():
                stack.enter_context(mock.patch.object(owner, method, self._timed(name, getattr(owner, method))))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        own_s, inside = self.own_s[name], self._inside

        def timed(*args: Any, **options: Any) -> Any:
            outer_s = getattr(inside, "others_s", 0.0)
            inside.others_s = 0.0
            start_s = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                elapsed_s = time.perf_counter() - start_s
                own_s.append(elapsed_s - inside.others_s)
                inside.others_s = outer_s + elapsed_s

        return timed
