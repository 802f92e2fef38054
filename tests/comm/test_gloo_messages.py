"""Tags: messages of different legs never match, and gloo can represent each tag."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddp_crossover.comm.gloo_messages import MessageKind, message_tag, small_exchange_tag
from ddp_crossover.comm.leg import MAX_GROUPS

ITERATIONS = 2**13  # after so many iterations tags are used again, long after the legs have ended
LEGS = st.tuples(st.sampled_from(MessageKind), st.integers(0, ITERATIONS - 1), st.integers(0, MAX_GROUPS - 1))


@given(LEGS, LEGS, st.integers(0, ITERATIONS - 1))
def test_different_legs_have_different_tags(one, other, number) -> None:
    assert (message_tag(*one) == message_tag(*other)) == (one == other)
    assert small_exchange_tag(number) not in (message_tag(*one), message_tag(*other))


@given(st.sampled_from(MessageKind), st.integers(0, 2**60), st.integers(0, MAX_GROUPS))
def test_every_tag_fits_into_31_bits(kind, iteration, group) -> None:
    assert 0 <= message_tag(kind, iteration, group) < 2**31
