"""The context of a process that `satrap run` or `satrap trainer` started: its rank, and the addresses that its script
leaves out.

A script is the same alone and on a cluster. Alone there is no context; in one, the script uses its servers, workers and
keys unless it names its own. Values only; the trainer's main program sets them before the script starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from satrap.config.validation import Serializable, check_integer, set_field
from satrap.errors import ConfigError

MAX_LAUNCHES = 2**16 - 2
"""Each launch has 2^16 attempts (`satrap.worker.server_group`), which are 32-bit numbers."""
COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Timeout of a collective in which one trainer may take much longer than the others. torch's own is half an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext(Serializable):
    """The context of one trainer."""

    rank: int
    world_size: int
    """Number of trainers."""
    launch: int
    """Number of times that `satrap run` launched the trainers, including this one; 0: it did not launch them."""
    servers: tuple[str, ...]
    """Addresses of the servers, in order."""
    first_launch: int = 1
    """The first launch of this run. A later one resumes a checkpoint, if there is one."""
    workers: tuple[str, ...] = ()
    """Addresses of the embedding workers; if empty, each trainer is its own worker."""
    is_copy: bool = False
    """Whether the script runs in a copy of its folder, which is deleted after the run."""
    keys: str | None = None
    """Path of the client's key file."""
    rendezvous: str | None = None
    """URL at which several trainers find each other, as in torch.distributed: "tcp://host:port", "file:///path"; "env://"
    for those that torchrun started."""
    num_threads: int | None = None
    """Threads of torch; None: torch's default."""
    clear: bool = False
    """Whether to remove rows of an earlier start that left no checkpoint, as `satrap run` always does."""

    def __post_init__(self) -> None:
        check_integer("RunContext", "world_size", self.world_size, 1, 2**32 - 1)
        check_integer("RunContext", "rank", self.rank, 0, self.world_size - 1)
        check_integer("RunContext", "launch", self.launch, 0, MAX_LAUNCHES)
        check_integer("RunContext", "first_launch", self.first_launch, 1, max(self.launch, 1))
        set_field(self, "servers", tuple(self.servers))
        set_field(self, "workers", tuple(self.workers))
        if not self.servers:
            raise ConfigError("RunContext: servers is empty; expected at least one address")
        if self.world_size > 1 and self.rendezvous is None:
            raise ConfigError(
                f"RunContext: {self.world_size} trainers need a rendezvous, and there is none; give its URL"
            )


_here: RunContext | None = None
_is_trial = False
_record_pipe: int | None = None
_before_end: list[Callable[[], None]] = []


def current_context() -> RunContext | None:
    """Return this process's context; None if `satrap run` did not start it."""
    return _here


def begin_trial() -> None:
    """Let this process only try its script, for `satrap plan`: see `is_trial`."""
    global _is_trial
    _is_trial = True


def is_trial() -> bool:
    """Return whether the script must leave no trace: it resumes and saves no checkpoint and records nothing."""
    return _is_trial


def record_pipe() -> int | None:
    """Return the pipe to which this process writes its record of training; None if the run gave it none."""
    return _record_pipe


def enter_context(context: RunContext, record: int | None = None) -> None:
    """Set this process's context. record: file descriptor of the pipe for its record of training."""
    global _here, _record_pipe
    _here, _record_pipe = context, record


def register_exit_hook(hook: Callable[[], None]) -> None:
    """Register a hook to run after the script. Without a run, does nothing."""
    if _here is not None:
        _before_end.append(hook)


def run_exit_hooks() -> None:
    """Run the hooks. Called when the script has ended, and again if another trainer has failed since."""
    for hook in _before_end:
        hook()
