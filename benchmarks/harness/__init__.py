"""The harness of all benchmarks: cases, processes that measure them in turn, records and the command line.

A benchmark is a `suite.Suite`. It declares its cases (`case.py`) and, for each kind of case, which processes a round
starts (`rounds.Run`) and what a record says (`record.Rounds`). `worker.py` is such a process; `forms.py` and `ranks.py`
give it threads, processes and cores, `clock.py` measures time, memory and noise. `peers.py` finds the environments of
the peers, `machine.py` describes where a result comes from.
"""
