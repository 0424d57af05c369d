"""Expected records of Satrap's log: `with logged("satrap.train", match=...)`, as `pytest.warns` does for warnings.

A test that causes a warning in the log without expecting it fails; see `nothing_is_logged` in conftest.py.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


class Records(logging.Handler):
    """Collects records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@contextmanager
def received(name: str, level: int = logging.INFO) -> Iterator[list[logging.LogRecord]]:
    """Collects the records of a logger, and of those below it, from this level on."""
    logger, handler = logging.getLogger(name), Records()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def logged(name: str, match: str, level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """Expects a record of the logger at this level that matches. No other handler gets the logger's records."""
    logger = logging.getLogger(name)
    before = logger.propagate
    with received(name, level) as records:
        logger.propagate = False
        try:
            yield records
        finally:
            logger.propagate = before
    found = [each.getMessage() for each in records if each.levelno == level]
    assert any(re.search(match, each) for each in found), f"{name} logged {found}; expected {match!r}"
