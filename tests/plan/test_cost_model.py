"""The link fit finds what is there; what cannot be told is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel

settings.register_profile("suite", deadline=None, max_examples=100)
settings.load_profile("suite")

LEG_BYTES = [2**power for power in range(12, 24, 2)]
BURSTS = [(legs, sent_bytes) for legs in (4, 16) for sent_bytes in (2**12, 2**16, 2**20)]

LINKS = st.builds(
    LinkModel,
    latency_s=st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
    per_leg_s=st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
    s_per_byte=st.floats(1e-11, 1e-6),
)

pytestmark = pytest.mark.quick


def lone_s(link: LinkModel, sent_bytes: int) -> float:
    return link.latency_s + link.per_leg_s + link.s_per_byte * sent_bytes


def burst_s(link: LinkModel, legs: int, sent_bytes: int) -> float:
    return link.latency_s + legs * (link.per_leg_s + link.s_per_byte * sent_bytes)


@given(LINKS)
def test_a_fit_of_exact_times_gives_the_link_back(link) -> None:
    lone = [(sent_bytes, lone_s(link, sent_bytes)) for sent_bytes in LEG_BYTES]
    bursts = [(legs, sent_bytes, burst_s(link, legs, sent_bytes)) for legs, sent_bytes in BURSTS]
    fitted = LinkModel.fit(lone, bursts)
    for sent_bytes in LEG_BYTES:
        assert lone_s(fitted, sent_bytes) == pytest.approx(lone_s(link, sent_bytes), rel=1e-6)
    for legs, sent_bytes in BURSTS:
        assert burst_s(fitted, legs, sent_bytes) == pytest.approx(burst_s(link, legs, sent_bytes), rel=1e-6)


def test_no_number_of_a_fit_is_negative() -> None:
    # Larger legs that came faster, and bursts faster than one leg: plain least squares goes below zero.
    fitted = LinkModel.fit([(1000, 2e-3), (2000, 1e-3), (4000, 1e-3)], [(4, 1000, 1e-3), (8, 1000, 1e-3)])
    assert min(fitted.latency_s, fitted.per_leg_s, fitted.s_per_byte) >= 0


@pytest.mark.parametrize(
    ("lone", "bursts", "words"),
    [
        ([(1000, 1e-3), (2000, 2e-3)], [], "burst"),
        ([(1000, 1e-3)], [(1, 1000, 1e-3)], "two sizes"),
        ([], [], "two sizes"),
    ],
)
def test_measurements_that_cannot_tell_are_refused(lone, bursts, words) -> None:
    with pytest.raises(ValueError, match=words):
        LinkModel.fit(lone, bursts)


def test_a_leg_sends_all_of_the_buffer_but_the_own_slice() -> None:
    link = LinkModel(latency_s=9.0, per_leg_s=0.5, s_per_byte=0.25)
    assert link.leg_s(400, world_size=4) == pytest.approx(0.5 + 0.25 * 300)


def test_direct_exchange_pays_per_peer_and_a_ring_per_hop() -> None:
    link = LinkModel(latency_s=1e-3, per_leg_s=1e-4, s_per_byte=1e-9)
    assert link.at_world_size(5).to_json() == pytest.approx(LinkModel(1e-3, 4e-4, 1e-9).to_json())
    ring = link.at_world_size(5, exchange="ring")
    assert ring.to_json() == pytest.approx(LinkModel(4e-3, 1e-4, 1e-9).to_json())
    grown = link.at_world_size(9, measured_at=5)
    assert grown.to_json() == pytest.approx(LinkModel(1e-3, 2e-4, 1e-9).to_json())
    with pytest.raises(ValueError, match="2 ranks"):
        link.at_world_size(1)


def test_impossible_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="s_per_byte"):
        LinkModel(0.0, 0.0, -1e-9)
    with pytest.raises(ValueError, match="arrival_s 1"):
        ComputeProfile((0.0, 0.1), (0.3,), 0.1, 0.2)
    with pytest.raises(ValueError, match="finite"):
        ComputeProfile((0.0,), (float("inf"),), 0.1, 0.2)
