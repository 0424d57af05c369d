"""`python -m benchmarks.cluster`: what the network between workers and servers costs.

`cases.py` has the cases and targets. A round is a worker process, and Paddle's parameter server (`paddle.py`,
`paddle_role.py`) as a peer. A kind has a file, which measures it in the worker and makes its record: `echo.py`,
`rows.py`, `train.py`, `wire.py` (the kind `bytes`), `network.py`, `restart.py`. The worker is the client and starts the
server (`processes.py`; `servers.py` has those of `echo`). `proxy.py` counts bytes, `tables.py` has the table of the
kinds that look up rows.

`network` has several machines: `machines.py` creates them from network namespaces, `switch.py` forwards their packets
when `link.py` says so, `probe.py` measures what that carries. `trainer.py` is a trainer on one of them, `prediction.py`
the speed that it should reach; `plot.py` draws both.
"""
