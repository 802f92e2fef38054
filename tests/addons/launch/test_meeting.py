"""Ranks of a job that another launcher than torchrun has started: rank 0 hosts the store through which they talk."""

from __future__ import annotations

import socket
import subprocess
import sys

from scripts_of_users import environment_of_user

LATE = """
import json, time
from ddp_crossover.addons.launch.meeting import Meeting

meeting, loads = Meeting(), json.loads
if meeting.rank == 1:
    json.loads = lambda text: time.sleep(1) or loads(text)
meeting.part()
"""


def test_rank_0_leaves_last() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LATE],
            env=environment_of_user(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate()
        assert rank.returncode == 0, errors
