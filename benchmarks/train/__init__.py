"""`python -m benchmarks.train`: whole training steps of a DLRM beside its peers, and what the embeddings cost of them.

`__main__.py` is the command line, `cases.py` says what is measured and the targets, `plan.py` which processes that
needs, `pairs.py` times one contender, `figures.py` makes the record. benchmarks/README.md says how a number is made.
"""
