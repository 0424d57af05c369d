"""`python -m benchmarks.accuracy`: the AUC that training reaches, and what staleness costs of it.

`cases.py` has the cases and targets, `jobs.py` runs them beside each other, `training.py` trains one model once,
`adult.py`, `flights.py` and `synthetic.py` are the three jobs, `figures.py` makes the record.
"""
