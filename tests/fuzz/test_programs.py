"""Each feature by itself, some random programs in every run, and all that have failed once; thousands in `-m nightly`.

A failure prints the program, shrunk, as one line of JSON: `python -m tests.fuzz --program FILE` runs it again. Once it
is mended, it goes into `corpus/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, find, given, settings

from .campaign import Report, campaign
from .drawing import programs
from .features import EVENTS
from .laws import fit
from .pairs import ANY, Meetings, Wanted, pairs_of, possible_pairs, traits
from .pool import FuzzPool, sum_up
from .program import Event, Program

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))

ALONE_STEPS = 14
ALONE_AT = 7  # in the pipeline
CLIPS = "torch's clipping at .* needs all gradients before optimizer.step"
MODES = "it is called inside of torch.inference_mode"
READS = "gradients were read or replaced before optimizer.step"
# Why updates wait, or are not deferred, with one feature only; all others must cost nothing.
REASONS = {
    "clip=norm": CLIPS,
    "clip=loop": CLIPS,
    "clip=one_norm": CLIPS,
    "clip=one_layer": CLIPS,
    "clip=log": CLIPS,
    "clip=value": READS,
    "clip_when=each": CLIPS,
    "second_backward": READS,
    "past_ddp=always": "did not come from a forward of DDP",
    "past_ddp=sometimes": READS,
    "scaler=stock": "torch's GradScaler at .* needs all gradients before optimizer.step",
    "overflow": "torch's GradScaler at .* needs all gradients before optimizer.step",
    "schedule=allreduce": "as asked for",
    "mode=function": MODES,
    "step_in=inference_mode": MODES,
    "step_in=function_mode": MODES,
    "parameters_kept_as_data": "shares its memory with another",
    "thread_reads_gradients": READS,
    "to_double_and_back": "between a forward and its backward",
}
# The second of two steps for one reduction finds its gradients spread.
REASONS_WITH_SHARDS = {"step_twice": READS}
# Also gradients that no reduction has written last: each rank has its own.
REFUSED_WITH_SHARDS = {
    *("schedule=allreduce", "second=one_optimizer", "to_double_and_back"),
    *("second_backward", "past_ddp=always", "past_ddp=sometimes"),
    *("local_edits=before_forward", "local_edits=before_step", "local_edits=as_data"),
}
# Whose state ends or begins in the middle, or may choose plain all-reduces.
DEFERS_FEWER = {"attached_again", "detached", "plans=random", "to_double_and_back"}


@pytest.fixture(scope="module", name="pool_of")
def _pools() -> Iterator[dict[int, FuzzPool]]:
    pools: dict[int, FuzzPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


def _pool(pools: dict[int, FuzzPool], ranks: int) -> FuzzPool:
    return pools.setdefault(ranks, FuzzPool(ranks))


def _assert_none_failed(report: Report) -> None:
    assert not report.failures, "\n\n".join(f"{one.program.to_json()}\n{one.detail}" for one in report.failures)
    assert report.counts["exact"] > report.programs // 2, f"programs that teach nothing: {report.counts}"


@pytest.mark.xdist_group("fuzz corpus")
@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_a_program_that_has_failed_once_agrees(file: Path, pool_of: dict[int, FuzzPool]) -> None:
    """Or is refused, if its file says so: what was trained then was nothing that a script can have meant."""
    text = file.read_text()
    program, ends = Program.from_json(text), json.loads(text).get("ends", ["exact"])
    assert program == fit(program), "its laws do not hold for it"
    outcome = _pool(pool_of, program.ranks).judge(program)
    assert not outcome.failure, outcome.failure
    assert set(outcome.counts) <= set(ends), f"it has not ended as {ends}: {outcome.counts}"


@pytest.mark.launches
@pytest.mark.xdist_group("fuzz features")
@pytest.mark.parametrize("label", traits())
def test_a_feature_by_itself_is_exact_and_costs_what_is_said(label: str, pool_of: dict[int, FuzzPool]) -> None:
    program = _with_one_feature(label)
    of_ranks = _pool(pool_of, program.ranks).verdicts(program)
    outcome = sum_up(program, of_ranks)
    assert not outcome.failure, outcome.failure
    if label.startswith("habit="):  # whose cost is no promise
        assert outcome.counts["exact"], outcome.counts
        return
    assert set(outcome.counts) == {"exact"}, f"plain DDP cannot do it, or it is refused: {outcome.counts}"
    for verdict, arm in zip(of_ranks[0], program.arms, strict=True):
        shards = arm.get("shard_optimizer")
        if shards and label in REASONS:
            continue
        reason = (REASONS_WITH_SHARDS if shards else REASONS).get(label)
        if reason is None:
            assert not verdict.fallbacks
        else:
            assert any(re.search(reason, each) for each in verdict.fallbacks), verdict.fallbacks
    if label not in REASONS.keys() | DEFERS_FEWER:
        assert of_ranks[0][0].deferred >= ALONE_STEPS // 2


def _with_one_feature(label: str) -> Program:
    wanted = traits()[label]
    places = {event.name: event.places for event in EVENTS}
    events = [Event(ALONE_AT, "stepped" if "stepped" in places[n] else places[n][0], n) for n in wanted.events]
    arms = [{"strict": True, **wanted.arm}, {"shard_optimizer": True, **wanted.arm}]
    if wanted.is_refused(wanted.script, {"shard_optimizer": True}) or label in REFUSED_WITH_SHARDS:
        arms.pop()
    script = {"optimizer": "momentum", **wanted.script}  # one that has a state
    return fit(Program(2, 1, ALONE_STEPS, script, tuple(arms), tuple(events)))


# One worker has the programs of one test: the groups begin side by side.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "first_seed", "count"),
    [
        pytest.param(2, 1, 20, marks=[pytest.mark.quick, pytest.mark.xdist_group("fuzz quick")]),
        pytest.param(2, 2, 20, marks=pytest.mark.xdist_group("fuzz on 2 ranks")),
        pytest.param(3, 500, 20, marks=pytest.mark.xdist_group("fuzz on 3 ranks")),
    ],
)
def test_random_programs_agree_with_plain_ddp(
    ranks: int, first_seed: int, count: int, pool_of: dict[int, FuzzPool]
) -> None:
    _assert_none_failed(campaign(_pool(pool_of, ranks), first_seed=first_seed, count=count, most_failures=1))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_programs_whose_plan_is_tuned_agree(pool_of: dict[int, FuzzPool]) -> None:
    report = campaign(_pool(pool_of, 2), first_seed=700, count=40, tuned=True, most_failures=1)
    _assert_none_failed(report)


@pytest.mark.nightly
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize(("ranks", "count"), [(2, 10_000), (3, 2_000), (4, 500)])
def test_thousands_of_programs_agree(ranks: int, count: int, pool_of: dict[int, FuzzPool]) -> None:
    _assert_none_failed(campaign(_pool(pool_of, ranks), first_seed=100_000 * ranks, count=count))


def test_a_defect_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch, pool_of: dict[int, FuzzPool]) -> None:
    """What a campaign does with a failure, shown on a judge that dislikes clipping."""
    from collections import Counter

    from .pool import Outcome

    def judge(pool: FuzzPool, program: Program) -> Outcome:
        dislikes = program.script.get("clip") == "value"
        return Outcome("differs" if dislikes else "", Counter(["fails" if dislikes else "exact"]))

    monkeypatch.setattr(FuzzPool, "judge", judge)
    report = campaign(FuzzPool(2), first_seed=0, count=300, most_failures=1)
    (failure,) = report.failures
    assert failure.program.script == {"clip": "value"}
    assert not failure.program.events
    assert Program.from_json(failure.program.to_json()) == failure.program


def test_a_failure_that_does_not_come_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import Counter

    from .pool import Outcome

    failures = iter(["hangs"])

    def judge(pool: FuzzPool, program: Program) -> Outcome:
        failure = next(failures, "")
        return Outcome(failure, Counter(["fails" if failure else "exact"]))

    monkeypatch.setattr(FuzzPool, "judge", judge)
    report = campaign(FuzzPool(2), first_seed=0, count=120)
    assert [failure.detail for failure in report.failures] == ["hangs"]
    assert report.programs >= 100, "other seeds follow"


def test_a_pair_of_features_that_is_wanted_is_drawn() -> None:
    drawn = settings(max_examples=1, phases=[Phase.generate])  # shrinking them would take minutes
    for pair in sorted(possible_pairs())[::499]:
        smallest = find(programs(2, possible_pairs()[pair]), lambda program: True, settings=drawn)
        assert set(pairs_of(smallest)) >= {pair}


def test_any_value_of_a_feature_that_is_wanted_is_drawn() -> None:
    drawn: set[str] = set()

    @settings(max_examples=60, database=None, phases=[Phase.generate])
    @given(programs(2, Wanted.of({"habit": ANY})))
    def draw(program: Program) -> None:
        if habit := program.script.get("habit"):  # laws take some away
            drawn.add(habit)

    draw()
    assert len(drawn) >= 10


def test_the_pair_that_has_met_least_comes_next() -> None:
    meetings = Meetings()
    meetings.counts.update(dict.fromkeys(possible_pairs(), 30))
    assert meetings.next(30) is None
    rare = ("clip=own", "shard_optimizer")
    meetings.counts[rare] = 29
    assert meetings.next(30) == possible_pairs()[rare]
    assert meetings.next(30) is None, "it is not drawn for ever, whatever comes of it"
