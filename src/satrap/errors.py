"""The exceptions that Satrap raises on purpose. This file only names them; whoever finds the fault writes the message.

A message says what was found, what was wanted and what to do, and names the table and id where they are known. The
native core throws the same classes. `assert` is kept for our own mistakes and never checks input.

    Exception
    └── SatrapError                       catch this to catch all of them
        ├── ConfigError                   also a ValueError: a configuration that cannot be honoured
        ├── InputError                    also a ValueError: an argument of a wrong dtype, shape or value
        │   └── NonFiniteError            a gradient is NaN or infinite, and the table refuses those
        ├── CapacityError                 also a RuntimeError: a full table may not evict what it would have to
        ├── SnapshotError                 also a ValueError: a saved table is torn, truncated, foreign or does not fit
        │   └── ChangesError              what changed since a snapshot is not all known any more
        ├── CheckpointError               also a ValueError: a run's checkpoint cannot be written, read or resumed
        ├── SourceError                   also a ValueError: a file, row or column of training data cannot be read
        ├── SharedMemoryError             also a RuntimeError: a shared-memory file cannot be made or attached
        ├── ForkError                     also a RuntimeError: a store is used in a fork of the process that made it
        ├── StreamError                   also a RuntimeError: a stream is used in a way that cannot go on
        ├── NotReadyError                 also a RuntimeError: a server has no job yet, or was restarted
        │   └── MovedError                a bucket is on the move to another server, or was moved there
        ├── AttemptError                  also a RuntimeError: a process of an older attempt calls a server
        ├── TicketError                   also a RuntimeError: a ticket was used before, or is unknown here
        └── RpcError                      also a RuntimeError: a call of another process failed there, or on the way
            └── DeadlineError             no answer came within the call's deadline
"""


class SatrapError(Exception):
    """The root: every error that Satrap raises on purpose."""


class ConfigError(SatrapError, ValueError):
    """A configuration value is of a wrong type, out of range, unknown, or contradicts another one."""


class InputError(SatrapError, ValueError):
    """An argument of a call has a wrong dtype, shape or value; the call changed nothing."""


class NonFiniteError(InputError):
    """A gradient holds NaN or infinity and the table has `on_nonfinite="raise"`; nothing was applied."""


class CapacityError(SatrapError, RuntimeError):
    """A table is full and no row may go: `on_full="raise"`, or every row is in use by an open step."""


class SnapshotError(SatrapError, ValueError):
    """A saved table cannot be read: torn, truncated, foreign, or written with another configuration."""


class ChangesError(SnapshotError):
    """What changed since a snapshot is not all known any more, so it cannot be saved: save the whole table."""


class CheckpointError(SatrapError, ValueError):
    """A checkpoint is missing, torn or of another job, or cannot be written."""


class SourceError(SatrapError, ValueError):
    """A source cannot be read: no such file or column, a malformed row, a torn file, a type that does not fit."""


class SharedMemoryError(SatrapError, RuntimeError):
    """A shared-memory file cannot be created, grown or attached."""


class ForkError(SatrapError, RuntimeError):
    """A store is used in a fork of the process that made it, which has neither its threads nor its locks."""


class NotReadyError(SatrapError, RuntimeError):
    """A server has no job yet, was restarted, or has another bucket map: say hello to it, and call again."""


class MovedError(NotReadyError):
    """A call touches a bucket that is on the move to another server, or is of an older bucket map: ask the server for
    the newest, and call again. Nothing was changed but by the buckets that note it in their windows."""


class AttemptError(SatrapError, RuntimeError):
    """A call is of another attempt than the server's: a process that was replaced, or one that came too early."""


class TicketError(SatrapError, RuntimeError):
    """A ticket was already used for an update, or belongs to another store."""


class StreamError(SatrapError, RuntimeError):
    """A stream of batches cannot go on: a batch was never stepped, or a second training stream is begun."""


class RpcError(SatrapError, RuntimeError):
    """A call of another process failed: a message that cannot be read, or an exception there that is none of these."""


class DeadlineError(RpcError):
    """No answer came within the call's deadline; whether the method ran is not known."""
