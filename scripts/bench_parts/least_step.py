"""The least time of a step: what no order and no cutting of the gradients can go below. Pure.

Compute alone takes C, and the link alone takes A, so a step takes max(C, A) at least. But the gradients that arrive
last are the first that the next forward needs, and the link idles before the first gradient arrives and after the last
parameter is in use. So most models cannot reach max(C, A).

The derivation. Time starts with a backward, and the next forward could begin at E, when backward and the rest of
compute have ended. Take the gradients that arrive at time t or later and are used at offset u of the forward or
earlier. Their scatter and gather legs occupy the link for some time w. None of it is before t, and all of it is before
the use, which is at E + u + d, where d is how long the forward has waited by then. So d >= t + w - (E + u), and a step
takes C + d or longer. This holds for every t and u; the largest d decides.

On an ideal link no time is lost on top of that. Let the forward wait for this largest d before it begins, which makes
all deadlines as late as they can be with that wait. Jobs that can be interrupted meet all their deadlines, earliest
deadline first, if between any two times there is not more work than time: which is the condition above, for every
t and u. Every gradient has arrived and is used between the start of one backward and the start of the next, so steps
do not borrow time from each other. To wait within the backward instead is no better: it delays arrivals as well.

The fixed costs of a link are counted as low as they can be: once for all gradients between t and u, not for every leg.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddp_crossover.plan.cost_model import LinkModel
from ddp_crossover.plan.model_profile import ModelProfile


def least_step_s(profile: ModelProfile) -> float:
    """Return the least time of a step in seconds, for any order and any cutting of the gradients.

    Args:
        profile: sizes, compute times and link of a model on 2 ranks or more. Gradients may be cut as finely as one
            likes. A parameter with a use after the end of the forward is needed at its end, as in the simulator.
    """
    link, compute = profile.link, profile.compute
    assert link is not None
    sent = [index for index, spec in enumerate(profile.specs) if spec.numel]
    sent.sort(key=lambda index: compute.use_s[index])
    arrival_s = np.array([compute.arrival_s[index] for index in sent])
    use_s = np.minimum([compute.use_s[index] for index in sent], compute.forward_s)
    own_leg_s = np.array([_wire_s(profile, link, index) for index in sent])
    forward_from_s = compute.backward_s + compute.rest_s
    wait_s = 0.0
    for from_s in np.unique(arrival_s):
        arrives_later = arrival_s >= from_s
        legs_s = np.cumsum(own_leg_s[arrives_later])  # entry by entry: of all that is used up to here
        usable_s = from_s + _both_legs_s(legs_s, link)
        wait_s = max(wait_s, float(np.max(usable_s - (forward_from_s + use_s[arrives_later]))))
    return compute.compute_s + wait_s


def _wire_s(profile: ModelProfile, link: LinkModel, index: int) -> float:
    """Seconds for which the bytes of one leg of one gradient occupy the link; of two different legs, their mean."""
    spec = profile.specs[index]
    leg_bytes = spec.wire_bytes * (spec.scatter_part + spec.gather_part) / 2
    return link.leg_s(leg_bytes, profile.world_size) - link.per_leg_s


def _both_legs_s(legs_s: NDArray[np.float64], link: LinkModel) -> NDArray[np.float64]:
    """From the first of some gradients' arrival until all of them can be used, given the time of one leg of them.

    An all-reduce pays ``per_leg_s`` once for both legs, so this may count it only once. The last element to be
    scattered is gathered later by the latency; the gather legs of other elements may fill that time.
    """
    both_s: NDArray[np.float64] = link.per_leg_s + legs_s + np.maximum(legs_s, link.latency_s) + link.latency_s
    return both_s
