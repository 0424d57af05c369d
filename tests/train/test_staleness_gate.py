"""The staleness gate against its two rules, over random orders of events, without threads or clocks."""

import random

from hypothesis import given
from hypothesis import strategies as st

from satrap.train.staleness_gate import StalenessGate


def run(gate: StalenessGate, num_batches: int, rng: random.Random, drop: float) -> list[tuple[str, int]]:
    """Simulate a stream with its user and pipeline, in a random order of all allowed events; return the events."""
    events: list[tuple[str, int]] = []
    looked_up = 0
    foreseen: dict[int, int] = {}
    held: dict[int, int] = {}  # step -> batches looked up, neither updated nor dropped
    submitted: list[int] = []
    if num_batches == 0:
        gate.exhaust()
    while looked_up < num_batches or held or submitted:
        choices = []
        if looked_up < num_batches and gate.may_look_up():
            choices.append("lookup")
        if held and (min(held) < gate.next_step or looked_up == num_batches):
            choices.append("step")
        if submitted and gate.may_update(submitted[0]):
            choices.append("update")
        assert choices, f"no event is allowed after {events}"
        match rng.choice(choices):
            case "lookup":
                foreseen = {looked_up + n: gate.step_after(n) for n in range(5)} | foreseen
                step = gate.look_up()
                assert foreseen[looked_up] == step
                looked_up += 1
                if looked_up == num_batches:
                    gate.exhaust()
                held[step] = held.get(step, 0) + 1
                events.append(("lookup", step))
            case "step":
                step = min(held)
                num = held.pop(step)
                if rng.random() < drop:
                    for _ in range(num):
                        gate.settle(step)
                    events.append(("drop", step))
                else:
                    submitted.extend([step] * num)
            case "update":
                step = submitted[0]
                while submitted and submitted[0] == step:
                    gate.settle(submitted.pop(0))
                events.append(("update", step))
    return events


@given(
    staleness=st.integers(0, 5),
    accumulate=st.integers(1, 3),
    deterministic=st.booleans(),
    num_batches=st.integers(0, 30),
    last_step=st.sampled_from([0, 7]),
    drop=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_no_lookup_misses_more_than_the_staleness(
    staleness: int, accumulate: int, deterministic: bool, num_batches: int, last_step: int, drop: float, seed: int
) -> None:
    gate = StalenessGate(staleness, accumulate=accumulate, deterministic=deterministic, last_step=last_step)
    events = run(gate, num_batches, random.Random(seed), drop)
    settled = set(range(last_step + 1))
    updates: list[int] = []
    for what, step in events:
        if what == "lookup":
            assert settled >= set(range(step - staleness)), f"step {step} was looked up without {staleness} older"
            if deterministic and drop == 0.0:
                assert [u for u in updates if u >= step - staleness] == [], (
                    "a lookup saw an update that it must not see"
                )
        else:
            settled.add(step)
            if what == "update":
                updates.append(step)
    lookups = [step for what, step in events if what == "lookup"]
    assert lookups == [last_step + 1 + i // accumulate for i in range(num_batches)]
    assert sum(gate.seen.values()) == num_batches
    assert max(gate.seen, default=0) <= staleness
    assert gate.oldest_open >= last_step + 1 + (num_batches // accumulate)


def test_the_staleness_seen_counts_open_steps() -> None:
    gate = StalenessGate(2, accumulate=2)
    steps = []
    while gate.may_look_up():
        steps.append(gate.look_up())
    assert steps == [1, 1, 2, 2, 3, 3]
    assert gate.seen == {0: 2, 1: 2, 2: 2}
    gate.settle(2)
    gate.settle(2)
    assert not gate.may_look_up(), "step 1 is still open"
    gate.settle(1)
    gate.settle(1)
    assert gate.look_up() == 4


def test_lookups_and_updates_may_overlap_unless_deterministic() -> None:
    assert [StalenessGate(staleness).allows_overlap for staleness in (0, 1, 4)] == [False, True, True]
    assert not any(StalenessGate(staleness, deterministic=True).allows_overlap for staleness in (0, 1, 4))
