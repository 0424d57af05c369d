"""Requests and replies between processes: a `Service` serves an object that satisfies a Protocol, a `Client` calls it.

    class Shard(Protocol):
        def lookup(self, origin: Origin, ids: NDArray[np.uint64]) -> NDArray[np.float32]: ...

    with Service(shard, Shard, "tcp://127.0.0.1:0") as service:
        with Client(Shard, service.address) as client:
            rows = client.call.lookup(Origin(trainer=0, step=1), ids)

From what decides to what does: header, values, methods and faults are what travels; schedule and ledger decide when a
call is sent and what becomes of a request; address and keys say where and with whom; service and client own the
sockets. Delivery is at least once, so served methods must be idempotent.

Service, Client and Keys need pyzmq (`pip install 'satrap[cluster]'`), which is imported when one is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from satrap.errors import RpcError
from satrap.rpc.header import Origin
from satrap.rpc.ledger import Limits

if TYPE_CHECKING:
    from satrap.rpc.client import Client, Pending
    from satrap.rpc.keys import Keys
    from satrap.rpc.service import Service

_LATER = {"Client": "client", "Keys": "keys", "Pending": "client", "Service": "service"}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'satrap.rpc' has no attribute {name!r}")
    try:
        return getattr(import_module(f"satrap.rpc.{_LATER[name]}"), name)
    except ModuleNotFoundError as error:
        raise RpcError(f"satrap.rpc.{name} needs pyzmq ({error}): pip install 'satrap[cluster]'") from error


__all__ = ["Client", "Keys", "Limits", "Origin", "Pending", "Service"]
