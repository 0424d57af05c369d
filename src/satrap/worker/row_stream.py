"""A training stream, as the rows know it."""


class RowStream:
    """What rows that several trainers share must know of a stream; other rows need to know nothing.

    Each method may be called again, from another thread, and after another stream was opened, and then does nothing.
    """

    def end_lookups(self) -> None:
        """Note that the stream needs no further lookup; those that come return zeros."""

    def end_updates(self) -> None:
        """Note that the stream has no further update, and wait until the rows have all of them."""

    def release(self) -> None:
        """Let calls fail that wait for other trainers: the stream ends with an error."""
