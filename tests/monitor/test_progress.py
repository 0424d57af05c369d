"""Progress: its text, its arithmetic against plain sums, and when it reports and reads tensors."""

import gc
import io
import math
import re
import weakref
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given

from example_reports import Clock, ListSink
from loop import job, train_step
from satrap import Checkpoint, Frame
from satrap.errors import ConfigError, InputError
from satrap.monitor.meter import Meter
from satrap.monitor.metrics import auc, normalised_entropy
from satrap.monitor.progress import Progress
from satrap.monitor.report import Counters, _seconds_left, line
from satrap.monitor.sinks import Screen

# -- numbers -----------------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.booleans(), st.booleans()), max_size=30)


@pytest.mark.filterwarnings("ignore:.* is undefined")
@given(steps, st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_a_report_covers_its_interval(drawn: list[tuple[int, int, bool, bool]], window: int, seed: int) -> None:
    """Compares with sums over everything since the last report; and for the window with sums over everything."""
    rng = np.random.default_rng(seed)
    began = Counters(staleness={0: 3}, stages={"lookup": 7.0}, inside=9.0)  # training before this interval
    meter, now, reported, total = Meter(0.0, counters=began, window=window), 0.0, 0.0, 0
    since: list[dict[str, Any]] = []
    seen, lookup, inside = Counter({0: 3}), 7.0, 9.0
    seen_labels, seen_scores = np.zeros(0), np.zeros(0)
    for number, (size, staleness, scored, report_now) in enumerate(drawn, 1):
        labels, scores = rng.integers(0, 2, size), rng.normal(size=size)
        each: dict[str, Any] = {"samples": size, "loss": rng.normal(), "staleness": staleness, "lookup": rng.random()}
        meter.step(now, number, size, each["loss"], labels if scored else None, scores if scored else None)
        since.append(each)
        total += size
        now += 0.5
        seen[staleness] += 1
        lookup, inside = lookup + each["lookup"], inside + 0.2
        if scored:
            seen_labels, seen_scores = np.append(seen_labels, labels), np.append(seen_scores, scores)
        assert meter.has_news
        if not report_now:
            continue
        counters = Counters(rows={"item": number}, staleness=dict(seen), stages={"lookup": lookup}, inside=inside)
        report = meter.report(now, counters)
        stale = [each["staleness"] for each in since]
        assert (report.step, report.samples, report.rows) == (number, total, {"item": number})
        assert report.seconds == now
        assert report.samples_per_second == pytest.approx(sum(each["samples"] for each in since) / (now - reported))
        assert report.loss == pytest.approx(np.mean([each["loss"] for each in since]))
        assert report.staleness == pytest.approx(np.mean(stale))
        assert report.max_staleness == max(stale)
        assert report.stages == {
            "lookup": pytest.approx(np.mean([each["lookup"] for each in since])),
            "dense": pytest.approx(0.3),
        }
        assert report.window == min(window, len(seen_labels))
        if len(seen_labels):
            last = slice(max(0, len(seen_labels) - window), None)
            assert report.auc == pytest.approx(auc(seen_labels[last], seen_scores[last]), nan_ok=True)
            expected = normalised_entropy(seen_labels[last], seen_scores[last])
            assert report.normalised_entropy == pytest.approx(expected, nan_ok=True)
        else:
            assert report.auc is None and report.normalised_entropy is None
        since, reported = [], now
        assert not meter.has_news


def test_steps_in_zero_seconds() -> None:
    meter = Meter(5.0)
    meter.step(0.0, 1, 10)
    assert meter.report(5.0).samples_per_second == 0.0


def test_a_diverged_model_is_shown_and_may_recover() -> None:
    meter = Meter(0.0)
    for number, score in enumerate((0.5, math.nan, 0.5), 1):
        scores = np.array([score, 0.1], np.float32)
        meter.step(0.0, number, 2, score, np.array([1, 0]), scores)
        report = meter.report(float(number))
        assert report.loss == pytest.approx(score, nan_ok=True)
        assert report.auc == pytest.approx(math.nan if math.isnan(score) else 1.0, nan_ok=True)
        assert ("loss nan" in line(report)) == ("AUC nan" in line(report)) == math.isnan(score)


def test_the_losses_kept_for_a_report_are_bounded() -> None:
    meter = Meter(0.0)
    for number in range(1, 2001):
        meter.step(0.0, number, 1, float(number))
    assert meter.report(1.0).loss == np.mean(np.arange(2001 - 512, 2001))


def test_tensors_of_any_shape_and_dtype() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        meter = Meter(0.0)
        scores = torch.tensor([[0.5], [-0.5]], dtype=dtype, requires_grad=True)
        meter.step(0.0, 1, 2, scores.sum(), torch.tensor([1, 0]), scores)
        report = meter.report(1.0)
        assert (report.auc, report.loss) == (1.0, 0.0)


def test_labels_and_scores_are_checked() -> None:
    meter = Meter(0.0)
    meter.step(0.0, 1, 2, None, np.zeros(2), np.zeros(3))
    with pytest.raises(InputError, match="Progress: 2 labels and 3 scores; expected one score per label"):
        meter.report(1.0)
    for labels, name in ((np.zeros((2, 2)), "labels"), (np.zeros(2), "scores")):
        meter = Meter(0.0)
        meter.step(0.0, 1, 2, None, labels, np.zeros((2, 2)))
        with pytest.raises(InputError, match=rf"Progress: {name} have the shape \(2, 2\); expected one column"):
            meter.report(1.0)


# -- when --------------------------------------------------------------------------------------------------------------


class SteppedBatch:
    """A batch after its step."""

    def __init__(self, step: int = 1, samples: int = 1, label: Any = None) -> None:
        self.step, self.samples, self.label = step, samples, label

    def __len__(self) -> int:
        return self.samples


class RecordingEmbeddings:
    """Embeddings that record when their counters are read."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.read_times = clock, list[float]()

    def counters(self) -> Counters:
        self.read_times.append(self.clock.now)
        return Counters(rows={"item": len(self.read_times)})


class LossOnDevice:
    """A loss on a device that counts how often it is waited for."""

    waits = 0

    def detach(self) -> "LossOnDevice":
        return self

    def __float__(self) -> float:
        LossOnDevice.waits += 1
        return 0.5


def test_reports_come_when_due_and_nothing_is_read_before() -> None:
    clock, kept = Clock(), ListSink()
    LossOnDevice.waits = 0
    item = RecordingEmbeddings(clock)
    with Progress(item, [kept], every_seconds=2.0, clock=clock) as progress:
        for number, now in enumerate((100.0, 101.0, 101.9, 102.0, 103.9, 104.5, 105.0), 1):
            clock.now = now
            progress.step(SteppedBatch(number, 10), loss=LossOnDevice())
            assert LossOnDevice.waits == (0, 0, 0, 4, 4, 6, 6)[number - 1]
        assert [report.step for report in kept.reports] == [4, 6]
    assert [(report.step, report.rows["item"]) for report in kept.reports] == [(4, 2), (6, 3), (7, 4)]
    assert item.read_times == [100.0, 102.0, 104.5, 105.0]
    assert [report.samples_per_second for report in kept.reports] == [40 / 2.0, 20 / 2.5, 70 / 5.0]
    assert kept.num_closed == 1


timed_steps = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 16), st.integers(0, 3)), min_size=2, max_size=30)


@example([(1, 64, 0)] + 63 * [(8, 1, 0)], 1000)
@given(timed_steps, st.integers(0, 1000))
def test_the_time_left_is_by_the_mean_since_the_first_step_and_the_last_line_by_all_steps(
    drawn: list[tuple[int, int, int]], resumed: int
) -> None:
    """Compares with sums over all steps, also where an evaluation follows a step, in a run that is resumed."""

    class Stream(RecordingEmbeddings):
        end_step = resumed + 100

        def counters(self) -> Counters:
            return Counters(stages={"lookup": self.clock.now}, staleness={2: round(4 * self.clock.now)})

    clock, kept = Clock(), ListSink()
    trained, samples = 0.0, 0
    times = list[float]()
    with Progress(Stream(clock), [kept], every_seconds=1.0, clock=clock) as progress:
        for number, (size, quarters, evaluated) in enumerate(drawn, 1):
            clock.now += quarters / 4
            trained, samples = trained + quarters / 4, samples + size
            times.append(trained)
            num_reports = len(kept.reports)
            progress.step(SteppedBatch(resumed + number, size))
            if evaluated:
                clock.now += evaluated
                progress.report_evaluation(resumed + number, {"auc": 0.5}, seconds=evaluated)
            for report in kept.reports[num_reports:]:
                left = (100 - number) * (trained - times[0]) / (number - 1) if number > 1 else None
                assert _seconds_left(report) == (None if left is None else pytest.approx(left))
        progress.log({"last": 1})  # so that there is one more report
    last = kept.reports[-1]
    assert (last.samples, last.steps) == (samples, len(drawn))
    assert last.samples_per_second == pytest.approx(samples / trained)
    assert last.steps_per_second == pytest.approx(len(drawn) / trained)
    assert last.staleness_counts == {2: round(4 * (clock.now - 100.0))}
    assert last.stages == {"lookup": pytest.approx((clock.now - 100.0) / len(drawn))}


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 3), st.integers(0, 39))
def test_the_end_is_known_from_the_samples_of_the_whole_run(total: int, size: int, world: int, resumed: int) -> None:
    """Each of the trainers has the same number of samples, in batches of one size, the last of which may be short."""

    class Several(RecordingEmbeddings):
        trainers = SimpleNamespace(world_size=world)

    steps = -(-total // size)
    first, kept = min(resumed, steps - 1) + 1, ListSink()
    with Progress(Several(Clock()), [kept], total_samples=total * world, every_seconds=1e-9) as progress:
        for step in range(first, steps + 1):
            progress.step(SteppedBatch(step, min(size, total - size * (step - 1))))
            report = kept.reports[-1]
            if step < steps or first < steps or steps == 1:
                assert (report.step, report.end_step) == (step, steps)
        for late in range(3 if first == 1 else 0):
            progress.step(SteppedBatch(steps + late + 1, size))
            assert kept.reports[-1].end_step == kept.reports[-1].step, "more samples than expected"


def test_a_bar_ends_with_the_stream_and_continues_after_a_resume(tmp_path: Path) -> None:
    shown: list[tuple[int, int | None]] = []
    ids = np.arange(13 * 8) % 30
    source = Frame(
        {"user": ids, "item": ids, "history": ids, "a": ids / 30, "b": ids / 30, "click": ids % 2},
        dense=["a", "b"],
        label="click",
        batch_size=8,
    )
    for stop_at in (5, None):
        embeddings, model, optimizer = job()
        run = Checkpoint(tmp_path / "run", model, optimizer, embeddings, source)
        run.resume()
        sink = ListSink()
        with Progress(embeddings, [sink], every_seconds=1e-9) as progress:
            for batch in embeddings.stream(source):
                train_step(model, optimizer, batch)
                progress.step(batch)
                if batch.step == stop_at:
                    run.save()
                    break
            if stop_at is not None:
                run.resume()  # which ends the stream early
                progress.report_evaluation(stop_at, {"auc": 0.5})
                assert sink.reports.pop().end_step is None
        embeddings.close()
        shown += [(report.step, report.end_step) for report in sink.reports]
    assert [end for _, end in shown] == [13] * len(shown)
    assert sorted({step for step, _ in shown}) == list(range(1, 14))


def test_an_evaluation_of_an_earlier_step_has_no_training_figures() -> None:
    kept, labels, scores = ListSink(), torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 2.0])
    with Progress(None, [kept]) as progress:
        for step in (1, 2):
            progress.step(SteppedBatch(step, 2), loss=0.5, scores=scores, labels=labels)
            progress.report_evaluation(1, {"auc": 0.75})
    same, later = kept.reports
    assert (same.loss, same.auc, same.validation) == (0.5, 1.0, {"auc": 0.75})
    assert (later.step, later.loss, later.auc, later.normalised_entropy, later.validation) == (
        1, None, None, None, {"auc": 0.75}
    )  # fmt: skip


def test_a_run_without_steps_reports_nothing() -> None:
    kept = ListSink()
    Progress(None, [kept]).close()
    assert (kept.reports, kept.num_closed) == ([], 1)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_an_auc_of_one_label_is_warned_of_once(label: float) -> None:
    """Once the window is full, or the loop ends: labels of a first few steps may well be alike."""
    clock = Clock()

    def report_steps(steps: int, window: int, label: float) -> None:
        with Progress(None, [ListSink()], every_seconds=1.0, window=window, clock=clock) as progress:
            for number in range(steps):
                clock.now += 2.0
                progress.step(SteppedBatch(number, 2, np.full(2, label)), scores=np.ones(2))
            progress.step(SteppedBatch(steps, 2, np.array([0.0, 1.0])), scores=np.ones(2))

    report_steps(3, 1 << 16, label)  # both labels by the end
    with pytest.warns(UserWarning) as caught:
        report_steps(9, 4, label)
    (warning,) = caught
    why = rf"Progress: AUC .* undefined \(nan\): all 4 labels are {label:.0f} at step 1; .* check the label column"
    assert re.match(why, str(warning.message))
    progress = Progress(None, [ListSink()], clock=clock)
    progress.step(SteppedBatch(1, 2, np.full(2, label)), scores=np.ones(2))
    with pytest.warns(UserWarning, match="all 2 labels are .* at step 1"):
        progress.close()


def test_padding_counts_only_as_a_step() -> None:
    """Several trainers end together: one without samples computes rows of zeros, which say nothing about the model."""
    kept = ListSink()
    progress = Progress(None, [kept], clock=Clock())
    progress.step(SteppedBatch(1, 2, np.array([0.0, 1.0])), loss=0.25, scores=np.array([-1.0, 1.0]))
    progress.step(SteppedBatch(2, 0, np.zeros(2)), loss=99.0, scores=np.ones(2))
    progress.close()
    (report,) = kept.reports
    assert (report.step, report.samples, report.loss, report.window, report.auc) == (2, 2, 0.25, 2, 1.0)


def test_a_step_keeps_no_graph() -> None:
    """A graph would keep the activations of every step since the last report in memory."""
    progress = Progress(None, [ListSink()], clock=Clock())
    activation = torch.ones(3, requires_grad=True) * 2
    scores = activation * activation
    progress.step(SteppedBatch(1, 3, torch.zeros(3)), loss=scores.sum(), scores=scores)
    gone = weakref.ref(activation)
    del activation, scores
    gc.collect()
    assert gone() is None


def test_no_more_than_the_window_waits_to_be_read() -> None:
    progress = Progress(None, [ListSink()], clock=Clock(), window=10)
    scores = [np.arange(4.0) for _ in range(50)]
    gone = [weakref.ref(each) for each in scores]
    for number in range(50):
        progress.step(SteppedBatch(number, 4, np.zeros(4)), scores=scores[number])
    scores.clear()
    assert sum(each() is not None for each in gone) == 3  # 12 samples cover 10


def test_after_an_error_nothing_is_read_and_all_sinks_are_closed() -> None:
    kept = ListSink()
    with pytest.raises(RuntimeError, match="the user's"), Progress(None, [kept], clock=Clock()) as progress:
        progress.step(SteppedBatch(), loss=0.0)
        raise RuntimeError("the user's own error")
    assert (kept.reports, kept.num_closed) == ([], 1)


def test_every_sink_is_closed_whatever_the_others_raise() -> None:
    class Broken(ListSink):
        def close(self) -> None:
            super().close()
            raise OSError("disk full")

    sinks = [ListSink(), Broken(), ListSink()]
    progress = Progress(None, sinks, clock=Clock())
    with pytest.raises(OSError, match="disk full"):
        progress.close()
    progress.close()
    assert [sink.num_closed for sink in sinks] == [1, 1, 1]


def test_the_interval_is_the_shortest_that_a_sink_requests() -> None:
    def first_report(sinks: list[Any], **options: Any) -> float:
        clock, kept = Clock(), ListSink()
        progress = Progress(None, [kept, *sinks], clock=clock, **options)
        while not kept.reports:
            clock.now += 0.25
            progress.step(SteppedBatch())
        return clock.now - 100

    assert first_report([]) == 10
    assert first_report([Screen(io.StringIO())]) == 10
    assert first_report([Screen(io.StringIO(), as_bar=True)]) == 1
    assert first_report([Screen(io.StringIO(), as_bar=True)], every_seconds=3) == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("embeddings", torch.nn.Identity(), "an Identity; expected the satrap.Embeddings, or None"),
        ("sinks", Screen(io.StringIO()), r"a Screen; expected a list of sinks, \[satrap\.Screen\(\)\]"),
        ("sinks", [Screen], r"a list; expected a list of sinks"),
        ("sinks", "screen", "a str; expected a list of sinks"),
        ("settings", Namespace(lr=0.1), r"a Namespace; expected a dict by name, such as vars\(args\)"),
    ],
)
def test_arguments_of_another_kind_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"Progress: {name} is {message}"):
        Progress(**{name: value})


def test_misuse_is_refused() -> None:
    for value in (0, -1, math.nan):
        with pytest.raises(ConfigError, match=r"Progress: every_seconds is .*; expected a number above 0"):
            Progress(None, [], every_seconds=value)
    with pytest.raises(ConfigError, match=r"Window: num_samples is 0 .*; expected an integer of at least 1"):
        Progress(None, [], window=0)
    progress = Progress(None, [])
    with pytest.raises(InputError, match=r"Progress\.step: batch is a Tensor; expected that of a stream"):
        progress.step(torch.tensor(0.5))  # type: ignore[arg-type]
    for loss in (torch.zeros(512), torch.zeros(0), np.zeros((2, 2))):
        with pytest.raises(InputError, match=rf"step: loss has the shape \{list(loss.shape)}; expected one number"):
            progress.step(SteppedBatch(), loss=loss)
    progress.step(SteppedBatch(), loss=torch.zeros(1, 1))
    progress.close()
    with pytest.raises(InputError, match=r"Progress\.step: this Progress is closed; create a new one"):
        progress.step(SteppedBatch())


def test_labels_of_several_heads_are_named() -> None:
    progress = Progress(None, [ListSink()])
    batch = SteppedBatch(1, 2, np.zeros((2, 2)))
    with pytest.raises(InputError, match=r"labels have the shape \(2, 2\); expected one column, e\.g\. labels\[:, 0\]"):
        progress.step(batch, scores=np.zeros(2))
    progress.step(batch, scores=np.zeros(2), labels=np.zeros(2))


# -- numbers of the script ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1e6, 1e6), st.booleans()), max_size=30))
def test_a_report_has_the_mean_of_what_was_logged_since_the_last(drawn: list[tuple[str, float, bool]]) -> None:
    clock, kept = Clock(), ListSink()
    since: dict[str, list[float]] = {}
    with Progress(None, [kept], every_seconds=1.0, clock=clock) as progress:
        for name, value, is_due in drawn:
            progress.log({name: torch.tensor(value, dtype=torch.float64)})
            since.setdefault(name, []).append(value)
            clock.now += is_due
            progress.step(SteppedBatch())
            if is_due:
                expected = {name: pytest.approx(np.mean(values)) for name, values in since.items()}
                assert (
                    kept.reports[-1].logged == expected == dict(list(kept.reports[-1].scalars().items())[-len(since) :])
                )
                since.clear()
        progress.log({"last": 3})
    assert kept.reports[-1].logged["last"] == 3.0, "also after the last step"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"loss": 1.0}, "the name 'loss' is taken by Progress itself; choose another, such as 'my loss'"),
        ({"rows/user": 1.0}, "the name 'rows/user' is taken"),
        ({"": 1.0}, "a name is ''; expected a text"),
        ({3: 1.0}, "a name is 3; expected a text"),
        ({"a": math.nan}, "'a' is nan; expected a finite number"),
        ({"a": "3"}, "'a' is '3'; expected a finite number"),
        ({"a": True}, "'a' is True; expected a finite number"),
        ({"a": None}, "'a' is None; expected a finite number"),
        ({"a": 10**400}, "expected a finite number, or a tensor of one"),
        ({"a": torch.ones(2)}, "expected a finite number, or a tensor of one"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_logged_are_refused(values: dict[Any, Any], why: str) -> None:
    kept = ListSink()
    with Progress(None, [kept]) as progress:
        with pytest.raises(InputError, match=f"Progress.log: .*{re.escape(why)}"):
            progress.log({"good": 1.0, **values})
        progress.step(SteppedBatch())
    assert kept.reports[0].logged == {}, "nothing of what is refused is kept"
    with pytest.raises(InputError, match=r"Progress\.log: this Progress is closed"):
        progress.log({"good": 1.0})
