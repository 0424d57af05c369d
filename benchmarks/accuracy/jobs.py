"""The runs of a case, each a pure function of (case, staleness, seed), so that they may run beside each other.

A run computes in one thread, and so do as many processes as there are cores: small networks gain little from a second
thread, and no result depends on how many processes there were.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.accuracy import adult, flights, synthetic
from benchmarks.accuracy.cases import AccuracyCase
from benchmarks.accuracy.training import Outcome, one_thread
from benchmarks.runs import say


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
    """Trains and tests once."""
    with one_thread():
        if job.case == "adult":
            return adult.run(job.staleness, job.seed)
        if job.case == "synthetic":
            return synthetic.run(job.staleness, job.seed, synthetic.QUICK if job.quick else synthetic.FULL)
        assert job.case == "flights" and job.flights is not None
        return flights.run(job.staleness, job.seed, job.flights)


def run_case(
    case: AccuracyCase, num_seeds: int, *, quick: bool, folder: Path | None, processes: int
) -> dict[tuple[int, int], Outcome]:
    """Every staleness with every seed; with one process, in this one."""
    jobs = [
        Job(case=case.name, staleness=staleness, seed=seed, quick=quick, flights=folder)
        for seed in range(num_seeds)
        for staleness in case.stalenesses
    ]
    outcomes: dict[tuple[int, int], Outcome] = {}
    if processes == 1:
        for job in jobs:
            _keep(outcomes, job, run_job(job))
        return outcomes
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for job, outcome in zip(jobs, pool.map(run_job, jobs), strict=True):
            _keep(outcomes, job, outcome)
    return outcomes


def _keep(outcomes: dict[tuple[int, int], Outcome], job: Job, outcome: Outcome) -> None:
    say(f"{job.case}: seed {job.seed}, staleness {job.staleness}: AUC {outcome.auc:.4f}")
    outcomes[job.staleness, job.seed] = outcome
