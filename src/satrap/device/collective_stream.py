"""A training stream of one of several trainers with rows on their devices."""

import threading

from satrap.device.collective_lookups import CollectiveLookups
from satrap.device.collective_updates import CollectiveUpdates
from satrap.interrupts import Uninterrupted
from satrap.worker.row_stream import RowStream


class CollectiveStream(RowStream):
    """Has the trainer answer the others with nothing once its own stream has ended."""

    def __init__(self, lookups: CollectiveLookups, updates: CollectiveUpdates) -> None:
        self.has_ended_lookups = False
        """Changes under the lock, so that no lookup follows the end of the lookups."""
        self.lock = threading.Lock()
        self.released = threading.Event()
        """Whether calls that wait for other trainers fail."""
        self._lookups, self._updates = lookups, updates
        self._has_ended_updates = self._is_settled = False

    def end_lookups(self) -> None:
        with self.lock:
            if not self.has_ended_lookups:
                self.has_ended_lookups = True
                self._lookups.idle()

    def end_updates(self) -> None:
        with Uninterrupted():
            if not self._has_ended_updates:
                self._has_ended_updates = True
                self._updates.idle()
        if not self._is_settled:  # else an earlier call has waited
            self._updates.settle()
            self._is_settled = True

    def release(self) -> None:
        self.released.set()
