"""`python -m benchmarks.cluster`: what the network between workers and servers costs, one JSON line per case.

`__main__.py` is the command line, `cases.py` says what is measured and the targets, `rounds.py` starts a worker process
for every round, `worker.py` is one. A kind of case has a file of its own (`echo.py`), which measures it in the worker
and makes its record, and is named in `kinds.py`; `servers.py` is the other process, `raw.py` the peer: plain sockets.

A worker is the client, and starts one server process for each contender. Contenders take turns of a few steps, so that
what the machine does meanwhile happens to all of them, and a ratio is taken inside a round. `echo` sends the unique ids
of a batch and gets as many bytes as their float32 rows have; nothing is looked up, so only the way there and back is
timed. Its bytes are those of ids and rows alone, both directions together.

`rows.py`, `train.py` and `wire.py` (the kind `bytes`) look rows up (`tables.py`) on the command `satrap server`
(`command.py`); `proxy.py` counts bytes, `restart.py` kills the server. `paddle.py` is their peer, which `rounds.py`
runs after the worker in every round: Paddle's parameter server, a server and a trainer (`paddle_role.py`) in an
environment of their own.

`network.py` has several machines: `machines.py` makes them of network namespaces, `switch.py` forwards their packets,
`link.py` decides when, `probe.py` says what that carries. `trainer.py` is a trainer there, `turn.py` what it is asked,
`prediction.py` what it should reach; `plot.py` draws both.
"""
