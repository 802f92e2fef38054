#!/usr/bin/env bash
# torch 2.15.0, gloo: a connection that carries data both ways takes a quarter more time of gloo's loop than two that carry
# it one way each.
#
# `send()` copies into the socket under the connection's lock. If data arrives meanwhile, the loop's thread wakes, does not
# get the lock, and asks epoll again at once, until the sender is done; on a rank with one core it even takes that core from
# the sender. With a process group for each direction nothing arrives where a thread sends. The speed is the same: the
# sockets are paced to 1 Gb/s here.
#
# Seen on two ranks, 200 MB each way, medians of three, both ranks' loops together: 352 and 266 ms; 291 and 237; 295 and
# 205.
# Exits 0 while one connection takes at least 5% more, 1 once gloo behaves otherwise, 2 where it cannot be measured.
# PYTHON (default: python3) must have this torch, or it is installed.
set -euo pipefail
py=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$py" -c 'import torch; assert torch.__version__.startswith("2.15.0")' 2>/dev/null ||
    "$py" -m pip install -q --disable-pip-version-check --target "$folder" torch==2.15.0 numpy
cat > "$folder/both_ways.py" <<'PY'
import contextlib
import os
import socket
import statistics
import sys

import torch
import torch.distributed as dist

SO_MAX_PACING_RATE, BYTES_A_SECOND = 47, 125_000_000  # of Linux
MESSAGES, ELEMENTS, RUNS = 200, 250_000, 3

rank = int(sys.argv[2])
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
groups = [dist.new_group(), dist.new_group()]
for fd in map(int, os.listdir("/proc/self/fd")):
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, BYTES_A_SECOND)


def loops_s():
    threads = [f"/proc/self/task/{thread}" for thread in os.listdir("/proc/self/task")]
    loops = [thread for thread in threads if open(f"{thread}/comm").read().startswith("gloo_tcp_loop")]
    return sum(int(open(f"{thread}/schedstat").read().split()[0]) for thread in loops) / 1e9


def exchange(there, back):
    """Seconds of the loops of both ranks."""
    outward, inward = (there, back) if rank == 0 else (back, there)
    arrived = [torch.empty(ELEMENTS) for _ in range(MESSAGES)]
    message = torch.ones(ELEMENTS)
    dist.barrier()
    begin_s = loops_s()
    receives = [inward.recv([memory], 1 - rank, tag) for tag, memory in enumerate(arrived)]
    dist.barrier()
    for tag in range(MESSAGES):
        outward.send([message], 1 - rank, tag).wait()
    for receive in receives:
        receive.wait()
    taken_s = torch.tensor(loops_s() - begin_s)
    dist.all_reduce(taken_s)
    return taken_s.item()


runs = [(exchange(groups[0], groups[0]), exchange(groups[0], groups[1])) for _ in range(RUNS + 1)][1:]
one, two = (statistics.median(times) for times in zip(*runs))
if rank == 0:
    print(f"torch {torch.__version__}: loops: one connection both ways {one * 1e3:.0f} ms, one each way {two * 1e3:.0f} ms", flush=True)
dist.destroy_process_group()
raise SystemExit(rank == 0 and one <= 1.05 * two)
PY
export PYTHONPATH="$folder" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"$py" -c 'import os; raise SystemExit(len(os.sched_getaffinity(0)) < 2)' || exit 2
timeout 120 "$py" "$folder/both_ways.py" "$folder/store" 1 &
other=$!
timeout 120 "$py" "$folder/both_ways.py" "$folder/store" 0
wait "$other"
