"""`python -m benchmarks.store`: how fast and how small Satrap's table is, beside its peers.

`cases.py` has the cases and targets, `plan.py` the processes of a round and the figures. `steps.py` times the tables of
`contenders.py`; `upkeep.py` measures Satrap alone: bytes per row, growth, snapshots.
"""
