"""A save that a thread completes while training continues."""

import threading
from collections.abc import Callable

from satrap.transfer import in_context


class BackgroundSave:
    """Work that runs in a thread; its error is raised by `wait`. The thread keeps the process alive until it ends."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = in_context(work)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="satrap-save", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the work has ended; raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
