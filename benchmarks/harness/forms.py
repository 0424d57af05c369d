"""The forms in which a peer is measured, of which its best one counts: threads, processes, huge pages. Pure data.

A label is a contender's name and the form: "fbgemm" has all threads of the case in one process and small pages,
"fbgemm/1t/huge" one thread and huge pages, "fbgemm/2p" two processes of one thread each.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.workload import NUM_FEATURES

# Makes torch back large arrays with huge pages, which numpy and Satrap do by default.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
ONE_THREAD = "1t"


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How many processes and threads measure a contender, and on which pages."""

    cores: int
    """Cores that the case gives every contender."""
    threads: tuple[int, ...]
    """Thread counts of each process, which it uses one after another on the same tables."""
    num_processes: int = 1
    huge_pages: bool = False

    @property
    def environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads[0]))
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if self.num_processes > 1 else {}
        return threads | loopback | (HUGE_PAGES if self.huge_pages else {})

    def label(self, name: str, num_threads: int | None = None) -> str:
        """Return the name of a contender in this form with one of its thread counts, by default the first."""
        count = num_threads or self.threads[0]
        processes = f"{self.num_processes}p" if self.num_processes > 1 else ""
        threads = f"{count}t" if count * self.num_processes < self.cores else ""
        return "/".join(part for part in (name, processes, threads, "huge" if self.huge_pages else "") if part)


def all_cores(cores: int, *, huge_pages: bool = False) -> Form:
    """Return the form of one process with a thread for each core."""
    return Form(cores=cores, threads=(cores,), huge_pages=huge_pages)


def satrap_forms(cores: int) -> list[Form]:
    """Return Satrap's forms: a table has one number of threads, so each number is a form. It uses huge pages itself."""
    return [Form(cores=cores, threads=(count,)) for count in _thread_counts(cores)]


def peer_forms(cores: int) -> list[Form]:
    """Return every form of a peer; a process for each core only where all processes get as many features."""
    forms = [Form(cores=cores, threads=_thread_counts(cores), huge_pages=huge) for huge in (False, True)]
    if cores == 1 or NUM_FEATURES % cores:
        return forms
    several = [Form(cores=cores, threads=(1,), num_processes=cores, huge_pages=huge) for huge in (False, True)]
    return [*forms, *several]


def _thread_counts(cores: int) -> tuple[int, ...]:
    return (cores, 1) if cores > 1 else (1,)


def labels_of(names: Iterable[str], labels: Iterable[str]) -> list[str]:
    """Return the labels of these contenders in any form."""
    names = set(names)
    return [label for label in labels if label.split("/")[0] in names]
