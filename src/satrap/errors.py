"""The exceptions that Satrap raises on purpose. This file only defines them; the code that finds the fault writes the
message.

A message says what was found, what was expected and what to do, and names the table and id where they are known. The
native core raises the same classes. `assert` is kept for Satrap's own bugs and never checks input.

    Exception
    └── SatrapError                       catch this to catch all of them
        ├── ConfigError                   also a ValueError: a configuration that cannot be honoured
        ├── InputError                    also a ValueError: an argument of a wrong dtype, shape or value
        │   └── NonFiniteError            a gradient is NaN or infinite, and the table refuses those
        ├── CapacityError                 also a RuntimeError: a table is full, and no row may be evicted
        ├── SnapshotError                 also a ValueError: a saved table is torn, truncated, foreign or does not fit
        │   └── ChangesError              the changes since a snapshot are no longer all known
        ├── CheckpointError               also a ValueError: a run's checkpoint cannot be written, read or resumed
        ├── SourceError                   also a ValueError: a file, row or column of training data cannot be read
        ├── SharedMemoryError             also a RuntimeError: a shared-memory file cannot be created or attached
        ├── ForkError                     also a RuntimeError: a store is used in a fork of the process that created it
        ├── StreamError                   also a RuntimeError: a stream is used in a way that cannot continue
        ├── NotReadyError                 also a RuntimeError: a server has no job yet, or was restarted
        │   └── MovedError                a bucket is migrating or has migrated to another server
        ├── AttemptError                  also a RuntimeError: a process of another attempt calls a server
        ├── TicketError                   also a RuntimeError: a ticket was already used, or is unknown here
        └── RpcError                      also a RuntimeError: a call to another process failed there, or on the way
            └── DeadlineError             no answer came within the call's deadline
"""


class SatrapError(Exception):
    """The base class of every error that Satrap raises on purpose."""


class ConfigError(SatrapError, ValueError):
    """A configuration value has a wrong type, is out of range, is unknown, or contradicts another one."""


class InputError(SatrapError, ValueError):
    """An argument of a call has a wrong dtype, shape or value; the call changed nothing."""


class NonFiniteError(InputError):
    """A gradient holds NaN or infinity and the table has `on_nonfinite="raise"`; nothing was applied."""


class CapacityError(SatrapError, RuntimeError):
    """A table is full and no row may be evicted: `on_full="raise"`, or every row is in use by an open step."""


class SnapshotError(SatrapError, ValueError):
    """A saved table cannot be read: torn, truncated, foreign, or written with another configuration."""


class ChangesError(SnapshotError):
    """The changes since a snapshot are no longer all known, so they cannot be saved: save the whole table."""


class CheckpointError(SatrapError, ValueError):
    """A checkpoint is missing, torn or from another job, or cannot be written."""


class SourceError(SatrapError, ValueError):
    """A source cannot be read: a file or column is missing, a row is malformed, a file is torn, a type does not fit."""


class SharedMemoryError(SatrapError, RuntimeError):
    """A shared-memory file cannot be created, grown or attached."""


class ForkError(SatrapError, RuntimeError):
    """A store is used in a fork of the process that created it, which has neither its threads nor its locks."""


class NotReadyError(SatrapError, RuntimeError):
    """A server has no job yet, was restarted, or has another bucket map: repeat the handshake with it, then retry."""


class MovedError(NotReadyError):
    """A call touches a bucket that is migrating to another server, or carries an older bucket map: fetch the newest map
    from the server, then retry. Nothing was changed except by the buckets that note the call in their windows."""


class AttemptError(SatrapError, RuntimeError):
    """A call belongs to another attempt than the server's: its process was replaced, or started too early."""


class TicketError(SatrapError, RuntimeError):
    """A ticket was already used for an update, or belongs to another store."""


class StreamError(SatrapError, RuntimeError):
    """A stream of batches cannot continue: a batch was never stepped, or a second training stream was started."""


class RpcError(SatrapError, RuntimeError):
    """A call to another process failed: a message cannot be read, or that process raised an exception that is not a
    SatrapError."""


class DeadlineError(RpcError):
    """No answer came within the call's deadline; whether the method ran is not known."""
