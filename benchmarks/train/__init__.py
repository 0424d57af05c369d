"""`python -m benchmarks.train`: whole training steps of a DLRM beside its peers, and what the embeddings cost of them.

`cases.py` has the cases and targets, `plan.py` the processes of a round and the figures, `pairs.py` times one contender
of `contenders.py` or `paddle.py`, `reading.py` the reading of a text file.
"""
