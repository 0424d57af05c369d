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
def logged(name: str, match: str, level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """Expects a record of the logger at this level that matches. No other handler gets the logger's records."""
    logger, handler = logging.getLogger(name), Records()
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level)
    try:
        yield handler.records
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]
        logger.setLevel(before[1])
    found = [each.getMessage() for each in handler.records if each.levelno == level]
    assert any(re.search(match, each) for each in found), f"{name} logged {found}; expected {match!r}"
