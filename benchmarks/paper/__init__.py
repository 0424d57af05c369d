"""`python -m benchmarks.paper`: the experiments of the paper Persia (arXiv 2111.05897), measured or modelled.

`__main__` runs the cells that the record lacks and makes the pages. An experiment is a module with `cells`: `theory`,
`convergence` (over `samples` and `training`), `network` (its trainers are `link_trainer`), `simulation`, `reuse`,
`capacity`, `campaign` (its job is `campaign_job`), `baselines` and `devices`. `machines` are the emulated network of
`network`: namespaces, whose packets `switch` forwards by the rules of `link`. `sections` says what the record shows,
`page` writes it, `plot` draws.
"""
