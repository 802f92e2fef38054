"""A training script that knows nothing of ddp_crossover: what the doctor examines, and what is then measured.

Prints the durations of its last steps as JSON on rank 0.
"""

import argparse
import itertools
import json
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench_kit.paced import Pace, layer_sizes
from bench_kit.training import Workload, paced_workload
from bench_parts import real

PARAMETERS = 5_000_000
BLOCKS, LAYERS = 8, 32
PACED_COMPUTE_S = 0.2
TOKENS = 160
MODELS = ("uniform", "heavy-end", "transformer")


def main() -> None:
    """Train; rank 0 prints a JSON list of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--timed", type=int, default=20, help="how many of the last steps are reported")
    parser.add_argument("--clip", action="store_true", help="clip gradients with torch's own function")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload = make_workload(args.model)
    ddp = DistributedDataParallel(workload.build())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    ends_s = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        workload.loss(ddp).backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        ends_s.append(time.perf_counter())
    if dist.get_rank() == 0:
        last = ends_s[-args.timed - 1 :]
        print(json.dumps([after - before for before, after in itertools.pairwise(last)]), flush=True)
    dist.destroy_process_group()


def make_workload(model: str) -> Workload:
    """Build what is trained: layers that sleep instead of computing, or a small transformer."""
    if model == "transformer":
        return real.MODELS[model](TOKENS)
    pace = Pace(PACED_COMPUTE_S / (3 * LAYERS))
    return paced_workload(layer_sizes(PARAMETERS, LAYERS, model), BLOCKS, pace)


if __name__ == "__main__":
    main()
