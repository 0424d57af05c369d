"""The runs of a case, each a pure function of (case, staleness, seed), so that they may run at the same time.

A run computes in one thread, and there are as many processes as cores: small networks gain little from a second thread,
and no result depends on the number of processes.
"""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.accuracy import adult, flights, synthetic
from benchmarks.accuracy.training import Outcome, one_thread
from benchmarks.harness.case import Case
from benchmarks.harness.machine import versions
from benchmarks.harness.rounds import Results, say


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run."""

    case: str
    staleness: int
    seed: int
    quick: bool
    flights: Path | None
    """The folder of the flights' tables."""


def run_job(job: Job) -> Outcome:
    """Train and test once."""
    with one_thread():
        if job.case == "adult":
            return adult.run(job.staleness, job.seed)
        if job.case == "synthetic":
            return synthetic.run(job.staleness, job.seed, synthetic.QUICK if job.quick else synthetic.FULL)
        assert job.case == "flights" and job.flights is not None
        return flights.run(job.staleness, job.seed, job.flights)


def run_case(case: Case, num_seeds: int, *, quick: bool, folder: Path | None, processes: int) -> Results:
    """Run every staleness with every seed; if processes is 1, in this process."""
    jobs = [
        Job(case=case.kind, staleness=staleness, seed=seed, quick=quick, flights=folder)
        for seed in range(num_seeds)
        for staleness in case.stalenesses
    ]
    outcomes = {}
    with ExitStack() as stack:
        run = map
        if processes > 1:
            run = stack.enter_context(ProcessPoolExecutor(processes, mp_context=get_context("spawn"))).map  # type: ignore[assignment]
        for job, outcome in zip(jobs, run(run_job, jobs), strict=True):
            say(f"{job.case}: seed {job.seed}, staleness {job.staleness}: AUC {outcome.auc:.4f}")
            outcomes[job.staleness, job.seed] = outcome
    return results_of(case, outcomes)


def results_of(case: Case, outcomes: Mapping[tuple[int, int], Outcome]) -> Results:
    """Return the outcomes by (staleness, seed) as the rounds of one run."""
    packages = versions("satrap", "torch", "numpy", "pyarrow")
    streams: dict[int, dict[str, object]] = {}
    for (staleness, seed), outcome in outcomes.items():
        streams.setdefault(seed, {})[f"{case.stream}{staleness}"] = asdict(outcome)
    return {"satrap": [{"streams": streams[seed], "versions": packages} for seed in sorted(streams)]}
