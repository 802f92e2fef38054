"""Jobs on several hosts, each with an arbiter of its own: they come to the same order on all of them.

In simulated time: test_lease_jobs.py shows that a broker does what its arbiter says.
"""

from __future__ import annotations

import pytest

from lease_cluster import Cluster, plain_steps


def simulated(compute_s: float, link_s: float, late_s: float, opposite: bool, hosts: int, seed: int) -> Cluster:
    """Jobs a and b, of which a rank each is late by itself, on different hosts."""
    cluster = Cluster(hosts, jitter_s=0.01 * compute_s, seed=seed)
    second_s = 0.5 * compute_s + late_s
    for host in range(hosts):
        for job, lates, leads in (("a", host == 1, host == 0 or not opposite), ("b", host == 0, host and opposite)):
            steps = plain_steps(compute_s, link_s, late_s if lates else 0.0)
            cluster.add(job, host, 0.0 if leads else second_s, steps)
    cluster.run(until_s=100 * (2 * compute_s + link_s))
    return cluster


def orders(cluster: Cluster, step: int) -> list[list[str]]:
    """On each host, who computed first in that step."""
    turns = [sorted((turn.start_s, turn.job) for turn in host if turn.step == step) for host in cluster.turns]
    return [[job for _, job in host] for host in turns]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("late", [0.02, 0.05, 0.15])
@pytest.mark.parametrize("link", [0.5, 1.0, 1.5])
def test_opposite_orders_become_one_within_three_steps(link: float, late: float, hosts: int, seed: int) -> None:
    compute_s = 0.02
    same, opposite = (simulated(compute_s, link * compute_s, late * compute_s, o, hosts, seed) for o in (False, True))
    assert orders(opposite, 0)[0] != orders(opposite, 0)[1]
    for step in range(3, 80):
        assert all(order == orders(opposite, step)[0] for order in orders(opposite, step)), step
    assert len(opposite.turns[0]) >= 0.95 * len(same.turns[0])
