#!/usr/bin/env bash
# A Python signal handler sees no __torch_function__ of tensor subclasses while a range of torch's profiler ends, and
# Optimizer.step(), zero_grad() and DataLoader end one each time: record_function.__exit__ holds
# torch._C.DisableTorchFunctionSubclass() over several lines of Python (torch 2.15.0), and handlers run between them.
# Printed: how many of 2000 reads in a handler did not ask the override. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
if ! "${PYTHON:=python3}" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2> "$folder/log"; then
    "$PYTHON" -m venv "$folder/venv"
    PYTHON=$folder/venv/bin/python
    "$PYTHON" -m pip install -q torch==2.15.0 numpy
fi
"$PYTHON" - <<'PY'
import signal, time
import torch


class Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(function, types, args, kwargs or {})


tensor = torch.ones(3).as_subclass(Counted)
signals = missed = 0


def handle(*_):
    global signals, missed
    before = Counted.calls
    torch.add(tensor, 1)
    signals, missed = signals + 1, missed + (Counted.calls == before)


torch.add(tensor, 1)
assert Counted.calls == 1  # it is asked otherwise
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], 0.1)
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
end = time.monotonic() + 60
while signals < 2000 and time.monotonic() < end:
    optimizer.step()
signal.setitimer(signal.ITIMER_REAL, 0)
print(f"torch {torch.__version__}: {missed} of {signals} reads in a signal handler did not ask the override")
assert missed
PY
