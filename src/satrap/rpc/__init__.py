"""Requests and replies between processes: a `Service` serves an object that satisfies a Protocol, a `Client` calls it.

    class Shard(Protocol):
        def lookup(self, origin: Origin, ids: NDArray[np.uint64]) -> NDArray[np.float32]: ...

    with Service(shard, Shard, "ipc:///run/user/1000/satrap/*") as service:
        with Client(Shard, service.address) as client:
            rows = client.call.lookup(Origin(trainer=0, step=1), ids)

header, values, methods and faults define the messages; schedule and ledger decide when a call is sent and how a request
is handled; address, unix_socket and keys define the endpoints; guard limits the TCP connections. A
service owns its sockets; a client has a channel, which is a socket, for each thread that calls. Delivery is at least
once, so served methods must be idempotent.

Needs pyzmq (`pip install 'satrap[cluster]'`).
"""

from satrap.errors import RpcError

try:
    from satrap.rpc.channel import PendingCall
    from satrap.rpc.client import Client
    from satrap.rpc.gather import Gathers, send_all
    from satrap.rpc.header import Origin
    from satrap.rpc.keys import Keys
    from satrap.rpc.ledger import Limits
    from satrap.rpc.schedule import Backoff
    from satrap.rpc.service import Service
except ModuleNotFoundError as error:
    raise RpcError(f"servers and workers need pyzmq ({error}): pip install 'satrap[cluster]'") from error

__all__ = ["Backoff", "Client", "Gathers", "Keys", "Limits", "Origin", "PendingCall", "Service", "send_all"]
