#!/usr/bin/env bash
# torch 2.15.0, DistributedDataParallel on two ranks: three common habits end the reduction of gradients, and
# nothing says so.
#
# 1. `step()` in `Tensor.register_post_accumulate_grad_hook`, as torch's tutorial on saving memory has it. DDP reduces
#    behind these hooks, so each rank updates with the gradients of its own samples.
# 2. A cast there and back once DDP is built (`ddp.double().float()`). DDP has hooks on autograd's accumulation nodes of
#    the parameters, the cast gives parameters new nodes, and no bucket is ever reduced again.
# 3. `register_parametrization()` between two steps, as for weight norm or pruning, with `find_unused_parameters=True`. It
#    gives the parameter a new node as well, and DDP takes it for unused from then on.
#
# Ranks that were built alike then train apart. There is no warning, also with TORCH_DISTRIBUTED_DEBUG=INFO.
#
# Seen: "greatest difference between ranks after 5 steps: usual 0, step in hook 0.07, cast 0.07, parametrization 0.09;
# warnings: 0".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
cat > "$folder/apart.py" <<'PY'
import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrize

STEPS = 5
HABITS = ("step in hook", "cast", "parametrization")


def difference(habit, rank):
    torch.manual_seed(0)
    ddp = DDP(torch.nn.Linear(4, 4), find_unused_parameters=habit == "parametrization")
    if habit == "cast":
        ddp.double().float()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in ddp.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    if habit == "step in hook":
        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
    samples = torch.Generator().manual_seed(rank)
    for index in range(STEPS):
        if habit == "parametrization" and index == 1:
            parametrize.register_parametrization(ddp.module, "weight", torch.nn.Identity())
        ddp(torch.randn(8, 4, generator=samples)).square().mean().backward()
        if habit != "step in hook":
            for parameter in optimizers:
                step(parameter)
    weights = [torch.empty(4, 4) for _ in range(2)]
    dist.all_gather(weights, ddp.module.weight.detach())
    return (weights[0] - weights[1]).abs().max().item()


if __name__ == "__main__":
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = {habit: difference(habit, rank) for habit in ("usual", *HABITS)}
    dist.destroy_process_group()
    if rank == 0:
        figures = ", ".join(f"{habit} {value:.1g}" for habit, value in found.items())
        print(f"torch {torch.__version__}: greatest difference between ranks after {STEPS} steps: {figures}; "
              f"warnings: {len(said)}")
    raise SystemExit(not (found["usual"] == 0 and all(found[habit] > 0.01 for habit in HABITS) and not said))
PY
export PYTHONPATH="$folder" OMP_NUM_THREADS=1 TORCH_DISTRIBUTED_DEBUG=INFO
timeout 120 "$py" "$folder/apart.py" "$folder/store" 1 &
other=$!
timeout 120 "$py" "$folder/apart.py" "$folder/store" 0
wait "$other"
