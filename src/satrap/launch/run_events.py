"""The processes of a run, the events that its supervisor handles, and the commands that it returns. Values only."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Role(StrEnum):
    """The role of a process in its run."""

    SERVER = "server"
    WORKER = "worker"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Process:
    """One incarnation of a process. After a restart it is another Process."""

    role: Role
    number: int
    incarnation: int
    """Counts the starts of this role and number, from 1. For a trainer it is the launch."""

    def __str__(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(frozen=True, slots=True)
class ProcessReady:
    """Event: a server or worker listens."""

    process: Process
    address: str


@dataclass(frozen=True, slots=True)
class ScriptStarted:
    """Event: a trainer has imported its libraries and joined the others, and runs the script from now on."""

    process: Process


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """Event: a process exited."""

    process: Process
    status: int
    """The exit status that subprocess reports: negative if a signal killed the process. A process that was killed
    because it did not stop in time counts as killed by SIGTERM."""


@dataclass(frozen=True, slots=True)
class PlacementFailed:
    """Event: no machine has room for a process, so it did not start."""

    process: Process
    reason: str


@dataclass(frozen=True, slots=True)
class MachineStopping:
    """Event: the machine of a server will stop soon."""

    process: Process


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """Event: the user or the autoscaler requests this number of servers."""

    servers: int
    reason: str
    waits: bool = False
    """Whether a request that cannot be met now is met later, unless another one comes first."""


@dataclass(frozen=True, slots=True)
class MigrationEnded:
    """Event: a `MigrateBuckets` command succeeded, or failed and is retried."""

    failure: str | None = None
    has_no_job: bool = False
    """It failed because no trainer has called the servers yet, so there are no buckets."""


@dataclass(frozen=True, slots=True)
class MigrationDue:
    """Event: the pause of a `PauseMigration` command is over."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Event: the run should stop. The second one kills its processes."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Command: start this process."""

    process: Process
    address: str | None = None
    """Where the previous incarnation listened, for this one to listen at if its rows exist; None: start empty."""


StopMode = Literal["interrupt", "terminate", "kill"]


@dataclass(frozen=True, slots=True)
class StopProcess:
    """Command: stop this process. It is killed if it does not exit within the grace period."""

    process: Process
    mode: StopMode
    release: bool = False
    """Whether its placement and its rows are released, because this run will not restart it."""


@dataclass(frozen=True, slots=True)
class MigrateBuckets:
    """Command: migrate the buckets of the current servers to the target servers. A `MigrationEnded` follows."""

    current: tuple[str, ...]
    target: tuple[str, ...]
    is_urgent: bool = False
    """Whether to move without pauses, because a machine will stop soon."""


@dataclass(frozen=True, slots=True)
class PauseMigration:
    """Command: a `MigrationDue` event follows after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LogMessage:
    """Command: print a line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ExitRun:
    """Command, the last one: no process is left; exit with this status."""

    status: int


Event = (
    ProcessReady
    | ScriptStarted
    | ProcessExited
    | PlacementFailed
    | MachineStopping
    | ScaleRequested
    | MigrationEnded
    | MigrationDue
    | StopRequested
)
Command = StartProcess | StopProcess | MigrateBuckets | PauseMigration | LogMessage | ExitRun
