"""`python -m benchmarks.accuracy`: the AUC that training reaches, and what staleness costs of it.

`__main__.py` is the command line, `cases.py` says what is trained and the targets, `training.py` trains one model once,
`adult.py`, `flights.py` and `synthetic.py` are the three jobs, `figures.py` makes the record. benchmarks/README.md says
how a number is made.
"""
