#!/usr/bin/env bash
# accelerate 1.15.0 with torch 2.15.0: `break` in a loop over the validation data changes how the rest of the epoch
# accumulates gradients.
#
# Evaluating some batches every so many steps is usual. `accumulate()` makes a step at the end of the training data, also
# when a group of micro-batches is not full; it asks the DataLoader whose loop began last and has not ended. A loop that
# is left by `break` never ends for it. So accumulate() asks the validation data until the next epoch:
# 1. after some of its batches the answer is no, the epoch's last micro-batches make no step, and the groups of the next
#    epoch are shifted;
# 2. after the last of its batches (a limit that is just their number) it is yes, and each micro-batch makes a step.
# There is no warning. `itertools.islice` in place of `break` is the same.
#
# Seen on two ranks, 10 micro-batches by 4, evaluation behind the seventh: "micro-batches of an epoch that make a step: no
# break 4 8 10; break after the last 4 8 9 10; break after one of 3 batches 4 8".
# Exits 0 while it is so, 1 once they behave otherwise.
# PYTHON (default: python3) must have both, or they are installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import accelerate, torch; assert torch.__version__.startswith("2.15.0"); assert accelerate.__version__ == "1.15.0"' \
    2>/dev/null || "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 accelerate==1.15.0 numpy
cat >"$folder/evaluate.py" <<'PY'
import os

import accelerate
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(2, 1)
model, optimizer, training, validation = accelerator.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    DataLoader(torch.randn(20, 2), batch_size=1),
    DataLoader(torch.randn(6, 2), batch_size=1),
)


def steps(limit=None):
    """The micro-batches of an epoch that make a step, where validation is left after so many batches."""
    made = []
    for index, x in enumerate(training, 1):
        with accelerator.accumulate(model):
            before = accelerator.unwrap_model(model).weight.clone()
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            if not torch.equal(before, accelerator.unwrap_model(model).weight):
                made.append(index)
        if index == 7:
            for seen, y in enumerate(validation, 1):
                accelerator.gather_for_metrics(y)
                if seen == limit:
                    break
    return made


assert len(training) == 10 and len(validation) == 3 and accelerator.num_processes == 2
found = {"no break": steps(), "break after the last": steps(3), "break after one of 3 batches": steps(1)}
if accelerator.is_main_process:
    print(
        f"torch {torch.__version__}, accelerate {accelerate.__version__}: micro-batches of an epoch that make a step: "
        + "; ".join(f"{way} {' '.join(map(str, made))}" for way, made in found.items())
    )
accelerator.end_training()
raise SystemExit(list(found.values()) != [[4, 8, 10], [4, 8, 9, 10], [4, 8]])
PY
PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$py" -m torch.distributed.run \
    --standalone --nproc-per-node 2 "$folder/evaluate.py"
