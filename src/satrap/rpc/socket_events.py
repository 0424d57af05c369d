"""The events of a ZeroMQ socket, which ZeroMQ reports on a second pair of sockets."""

import itertools

import zmq

_numbers = itertools.count()


def watch_events(socket: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
    """Return the socket on which the events of another one arrive from now on. Its address is never used again: ZeroMQ
    frees an address only some time after it was closed, and pyzmq's own choice is the watched socket's descriptor."""
    return socket.get_monitor_socket(events, f"inproc://satrap-events-{next(_numbers)}")
