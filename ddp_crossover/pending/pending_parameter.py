"""PendingParameter: a parameter whose deferred update is applied when its value is first used.

While an update is pending, the class of the parameter object is :class:`PendingParameter` instead of ``nn.Parameter``.
Torch looks up ``__torch_function__`` on the arguments of every operator, to see whether one of them overrides it. A
pending parameter uses this look-up to apply its update: it turns back into an ``nn.Parameter`` and reports that it
overrides nothing, and the operator continues with the updated value.

This module knows no optimizers and no communication: it is given an owner object to call for each pending parameter.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

_NOT_OVERRIDDEN = torch._C._disabled_torch_function_impl


class Owner(Protocol):
    """Applies the pending update of one parameter."""

    def use(self) -> None:
        """Apply the update and call :func:`disarm`. Does nothing if this thread is already updating it."""

    def use_all(self) -> None:
        """Do the same for all parameters of the model."""


# By id of the parameter. The owner holds the parameter, so the id is not reused while it is a key here. An attribute
# of the parameter would be copied and pickled with it.
_owners: dict[int, Owner] = {}
# By thread: the exception of a failed update, until an operator raises it.
_failures: dict[int, BaseException] = {}


def arm(parameter: Tensor, owner: Owner) -> None:
    """Have ``owner.use()`` called before the value of this parameter is used. Takes 0.2 us."""
    _owners[id(parameter)] = owner
    parameter.__class__ = PendingParameter


def disarm(parameter: Tensor) -> None:
    """Make the parameter a plain ``nn.Parameter`` again, now that its value is up to date."""
    parameter.__class__ = Parameter
    _owners.pop(id(parameter), None)


def is_armed(parameter: Tensor) -> bool:
    """Whether the parameter has not been touched since :func:`arm`."""
    return type(parameter) is PendingParameter


def is_armed_by(parameter: Tensor, owner: Owner) -> bool:
    """Whether ``owner`` will be called by the next touch."""
    return _owners.get(id(parameter)) is owner


def touch(parameter: Tensor) -> None:
    """Apply the parameter's update, if it is pending, and make it plain."""
    # It has no owner if another thread has disarmed it in between.
    if type(parameter) is PendingParameter and (owner := _owners.get(id(parameter))) is not None:
        owner.use()


def _use_everything() -> None:
    """Apply all pending updates of all models."""
    for key, owner in list(_owners.items()):
        if key in _owners:  # otherwise another owner of the same model has done it
            owner.use_all()


def _raise_failure(*args: object, **kwargs: object) -> NoReturn:
    """Called by torch in place of an operator when a parameter's update has failed."""
    raise _failures.pop(threading.get_ident())


class _UseBeforeAnswering:
    """The ``__torch_function__`` of a pending parameter: looking it up applies the update.

    Not a handler that applies it and calls the function again: that dispatches twice, must know which functions need no
    value, comes second if an activation has a handler of its own, and leaves the class in place for code that only
    looks at it, as ``TransformerEncoder``'s fast path does. The look-up comes before all of these.

    Torch swallows exceptions raised by the look-up and would continue with the old value. So the exception is stored,
    and the look-up returns a function that raises it.
    """

    def __get__(self, parameter: Tensor | None, kind: type) -> Any:
        if _failures and threading.get_ident() in _failures:
            return _raise_failure
        try:
            if parameter is not None:
                touch(parameter)
            elif not torch._C._is_torch_function_mode_enabled():
                # Torch looks it up on the class when another argument overrides the call, and the override may then use
                # the parameter without another look-up. The parameter is unknown here, so apply all updates. Function
                # modes need none of this: they call the function again, with a look-up on the parameter itself.
                _use_everything()
        except BaseException as error:
            _failures[threading.get_ident()] = error
            return _raise_failure
        return _NOT_OVERRIDDEN


def _needs_no_value(name: str) -> Any:
    """An attribute or a method of ``Tensor`` that works without applying the update."""
    # Not `with torch._C.DisableTorchFunctionSubclass()`: a signal handler that runs inside would read old values.
    original, past_classes = getattr(Tensor, name), _NOT_OVERRIDDEN
    if not hasattr(original, "__set__"):
        return lambda self, *args, **kwargs: past_classes(original, (), (self, *args), kwargs)
    get, put = original.__get__, original.__set__
    return property(
        lambda self: past_classes(get, (), (self,), {}), lambda self, value: past_classes(put, (), (self, value), {})
    )


class PendingParameter(Parameter):
    """An ``nn.Parameter`` with a pending update. Only :func:`arm` makes one, out of an existing parameter.

    Some things that training loops use between two steps need no value and do not apply the update: ``grad``,
    ``requires_grad``, ``shape``, ``dtype``, ``device``, the number of elements, gradient hooks.
    """

    __torch_function__ = _UseBeforeAnswering()

    def __new__(cls, *args: Any, **kwargs: Any) -> Parameter:  # type: ignore[misc]
        # `type(parameter)(data)`, as in `Parameter.__deepcopy__`, must return a new plain parameter.
        return Parameter(*args, **kwargs)

    for _name in (
        *("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "is_cuda", "ndim", "nbytes", "itemsize"),
        *("requires_grad_", "size", "dim", "numel", "nelement", "element_size", "register_hook", "__len__"),
        "register_post_accumulate_grad_hook",
    ):
        locals()[_name] = _needs_no_value(_name)
    del _name
