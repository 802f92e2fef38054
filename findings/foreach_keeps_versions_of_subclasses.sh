#!/usr/bin/env bash
# torch 2.15.0: an in-place torch._foreach_* function does not raise the version of a tensor subclass in its list, nor of
# the plain tensors beside it. In-place methods of the subclass do, and so does torch._foreach_* with plain tensors alone.
#
# Who tells by `_version` whether a gradient was written is misled where DDP writes gradients of a subclass that way: with
# batched_grad_copy=True. torch.autograd.graph.increment_version() mends it by hand.
#
# Seen: "copy_: subclass 1, plain 1; _foreach_copy_: subclass 0, plain beside it 0, plain alone 1".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" - <<'PY'
import torch
from torch.utils._pytree import tree_map_only


class Wrapper(torch.Tensor):
    """Holds a tensor, and passes every operation on to it."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args_held, kwargs_held = tree_map_only(Wrapper, lambda each: each.held, (args, kwargs or {}))
        out = func(*args_held, **kwargs_held)
        return args[0] if isinstance(args[0], Wrapper) else out


def tensors(wraps):
    return [Wrapper(torch.zeros(3)) if wraps else torch.zeros(3), torch.zeros(3)]


ones = [torch.ones(3), torch.ones(3)]
one_by_one, mixed, plain = tensors(True), tensors(True), tensors(False)
for each, one in zip(one_by_one, ones):
    each.copy_(one)
torch._foreach_copy_(mixed, ones)
torch._foreach_copy_(plain, ones)
assert torch.equal(mixed[0].held, ones[0]) and torch.equal(mixed[1], ones[1])
seen = [each._version for each in (*one_by_one, *mixed, plain[0])]
print(
    f"torch {torch.__version__}: copy_: subclass {seen[0]}, plain {seen[1]}; "
    f"_foreach_copy_: subclass {seen[2]}, plain beside it {seen[3]}, plain alone {seen[4]}"
)
raise SystemExit(seen != [1, 1, 0, 0, 1])
PY
