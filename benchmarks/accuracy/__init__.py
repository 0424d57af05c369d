"""`python -m benchmarks.accuracy`: the AUC that training reaches, and what staleness costs of it."""
