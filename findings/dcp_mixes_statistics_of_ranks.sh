#!/usr/bin/env bash
# torch 2.15.0: a checkpoint that `torch.distributed.checkpoint` writes of a DDP model can have a batch norm's running mean
# from one rank and its running variance from another.
#
# Plain tensors of one name count as copies of each other, and which rank writes which is decided by size, to share out
# the work. But DDP keeps the buffers of its ranks alike in the forward only: between two steps each rank has statistics
# that its own last samples have moved. So the pair in the checkpoint is one that no rank has had. Sizes decide which layers
# it meets: by torch's own plan on eight ranks 11 of the 20 of torchvision's resnet18, on two ranks none. The documentation
# of `save()` tells of shards and not of copies, and there is neither an error nor a warning. A planner that has copies
# written by the lowest rank, `DefaultSavePlanner(dedup_save_to_lowest_rank=True)`, keeps all pairs together.
#
# What each rank has for itself goes the same way: with `torch.get_rng_state()` in the checkpoint, all ranks draw the
# dropout of one of them from then on. https://github.com/pytorch/pytorch/issues/146566 asks for tensors of single ranks.
#
# Seen on two ranks: "the checkpoint has running_mean of rank 1, running_var of rank 0, by that planner of ranks 0 and 0;
# after loading, generators of ranks 0 and 1 are those of ranks 0 and 0".
# Exits 0 while it is so, 1 once torch behaves otherwise.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
cat > "$folder/mixed.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


def of_ranks(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def owner(loaded, name):
    """The rank whose tensor of this name is the one that was loaded, before the checkpoint."""
    [of] = [of for of, tensors in enumerate(before) if torch.equal(tensors[name], loaded)]
    return of


torch.manual_seed(0)
ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(3):
    optimizer.zero_grad()
    ddp(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
before = of_ranks({"generator": torch.get_rng_state(), **dict(ddp.module[1].named_buffers())})


def owners(planner=None):
    """The ranks that mean, variance and this rank's generator are of, after a checkpoint was saved and loaded."""
    model, state = get_state_dict(ddp, optimizer)
    model = {name: tensor.clone() for name, tensor in model.items()}
    checkpoint = {"model": model, "optimizer": state, "generator": torch.get_rng_state()}
    dcp.save(checkpoint, checkpoint_id=sys.argv[3], planner=planner)
    dcp.load(checkpoint, checkpoint_id=sys.argv[3])
    statistics = (owner(model[f"1.{name}"], name) for name in ("running_mean", "running_var"))
    return *statistics, owner(checkpoint["generator"], "generator")


mean, variance, generator = owners()
together = owners(DefaultSavePlanner(dedup_save_to_lowest_rank=True))[:2]
generators = of_ranks(generator)
dist.destroy_process_group()
if rank == 0:
    print(
        f"torch {torch.__version__}: the checkpoint has running_mean of rank {mean}, running_var of rank {variance}, by that "
        f"planner of ranks {together[0]} and {together[1]}; after loading, generators of ranks 0 and 1 are those of ranks "
        f"{generators[0]} and {generators[1]}"
    )
raise SystemExit(not (mean != variance and together == (0, 0) and generators[0] == generators[1]))
PY
export PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
timeout 120 "$py" "$folder/mixed.py" "$folder/store" 1 "$folder/checkpoint" &
other=$!
timeout 120 "$py" "$folder/mixed.py" "$folder/store" 0 "$folder/checkpoint"
wait "$other"
