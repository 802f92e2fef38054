"""PendingParameter: a parameter whose update has been asked for and is applied when somebody touches its value.

While an update is pending, the class of the parameter object is :class:`PendingParameter` instead of ``nn.Parameter``.
Every operator, and everything else in torch that looks at a tensor, first asks the tensor whether it wants to handle
the call itself: it looks up ``__torch_function__``. A pending parameter takes this look as the moment to be brought up
to date. It turns back into an ``nn.Parameter`` and answers "no", and the operator goes on with the right value.

This module knows nothing of optimizers or communication: it is given an object to call for each pending parameter.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

_NOT_OVERRIDDEN = torch._C._disabled_torch_function_impl


class Keeper(Protocol):
    """Knows what one parameter waits for."""

    def use(self) -> None:
        """Bring the parameter up to date and call :func:`disarm`; or leave it, if this thread is updating it now."""

    def use_all(self) -> None:
        """The same for all parameters of the model."""


# By the parameter's id. The keeper holds the parameter, so an id means the same object while it is here. Not an
# attribute of the parameter, because copying and pickling would take it along.
_keepers: dict[int, Keeper] = {}
# By thread: what went wrong when a parameter was asked, until an operator has raised it.
_failures: dict[int, BaseException] = {}


def arm(parameter: Tensor, keeper: Keeper) -> None:
    """Call ``keeper.use()`` before anybody sees the value of this parameter. Takes 0.2 us."""
    _keepers[id(parameter)] = keeper
    parameter.__class__ = PendingParameter


def disarm(parameter: Tensor) -> None:
    """The value is right from now on."""
    parameter.__class__ = Parameter
    _keepers.pop(id(parameter), None)


def is_armed(parameter: Tensor) -> bool:
    """Whether nobody has touched the value since :func:`arm`."""
    return type(parameter) is PendingParameter


def is_armed_by(parameter: Tensor, keeper: Keeper) -> bool:
    """Whether ``keeper`` will be called by the next touch."""
    return _keepers.get(id(parameter)) is keeper


def touch(parameter: Tensor) -> None:
    """Bring the parameter up to date, if it is pending."""
    if type(parameter) is PendingParameter:
        keeper = _keepers.get(id(parameter))
        keeper.use() if keeper is not None else _use_unknown(parameter)


def _use_unknown(parameter: Tensor) -> None:
    """Another thread has just made it plain, or ``torch.utils.swap_tensors`` has given this object what was pending."""
    if type(parameter) is PendingParameter:
        use_everything()
        disarm(parameter)


def use_everything() -> None:
    """Bring all pending parameters up to date, of all models."""
    for key, keeper in list(_keepers.items()):
        if key in _keepers:  # else another parameter's keeper has done it for the whole model
            keeper.use_all()


class _RaiseFailure:
    """What an operator calls instead of working with a parameter that could not be brought up to date."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise _failures.pop(threading.get_ident())


_raise_failure = _RaiseFailure()


class _UseBeforeAnswering:
    """The ``__torch_function__`` of a pending parameter: looking it up brings the parameter up to date.

    Torch swallows exceptions of this look-up and would go on with the old value. So an exception is kept, and the
    answer is a function that raises it.
    """

    def __get__(self, parameter: Tensor | None, kind: type) -> Any:
        if _failures and threading.get_ident() in _failures:
            return _raise_failure
        try:
            if parameter is not None:
                touch(parameter)
            elif not torch._C._is_torch_function_mode_enabled():
                # The class is asked where another argument wants to handle the call, and that one may hide this
                # parameter from us. A mode does not: it calls the function again, which asks the parameter itself.
                use_everything()
        except BaseException as error:
            _failures[threading.get_ident()] = error
            return _raise_failure
        return _NOT_OVERRIDDEN


def _needs_no_value(name: str) -> Any:
    """An attribute or a method of ``Tensor`` that works without bringing the parameter up to date."""
    # As `with torch._C.DisableTorchFunctionSubclass()`, but no signal handler comes in between, where it would not ask.
    original, past_classes = getattr(Tensor, name), _NOT_OVERRIDDEN
    if not hasattr(original, "__set__"):
        return lambda self, *args, **kwargs: past_classes(original, (), (self, *args), kwargs)
    get, put = original.__get__, original.__set__
    return property(
        lambda self: past_classes(get, (), (self,), {}), lambda self, value: past_classes(put, (), (self, value), {})
    )


class PendingParameter(Parameter):
    """An ``nn.Parameter`` with a pending update. Made by :func:`arm` only, out of an existing parameter.

    What training loops ask parameters for between two steps without looking at the value does not apply the update:
    ``grad``, ``requires_grad``, ``shape``, ``dtype``, ``device``, the number of elements, gradient hooks.
    """

    __torch_function__ = _UseBeforeAnswering()

    def __new__(cls, *args: Any, **kwargs: Any) -> Parameter:  # type: ignore[misc]
        # `type(parameter)(data)`, as in `Parameter.__deepcopy__`, wants a parameter of its own.
        return Parameter(*args, **kwargs)

    for _name in (
        *("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "is_cuda", "ndim", "nbytes", "itemsize"),
        *("requires_grad_", "size", "dim", "numel", "nelement", "element_size", "register_hook", "__len__"),
        "register_post_accumulate_grad_hook",
    ):
        locals()[_name] = _needs_no_value(_name)
    del _name
