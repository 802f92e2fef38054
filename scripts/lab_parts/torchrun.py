"""The environment variables that torchrun gives its workers.

Source: torch/distributed/elastic/agent/server/local_elastic_agent.py.
"""

import os


def worker_variables(
    rank: int, world_size: int, per_host: int, master: tuple[str, int], run_id: str, *, agent_has_store: bool
) -> dict[str, str]:
    """Return them, by name.

    Args:
        rank: of the worker.
        world_size: how many workers there are.
        per_host: how many each host has.
        master: address and port at which ranks meet.
        run_id: a text of this run.
        agent_has_store: whether what has started the ranks serves the store there; else rank 0 does.
    """
    hosts = str(world_size // per_host)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_host),
        "GROUP_RANK": str(rank // per_host),
        "NODE_RANK": str(rank // per_host),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_WORLD_SIZE": hosts,
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_has_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
