"""`python -m benchmarks.cluster`: what the network between workers and servers costs.

A kind has a file, which measures it in a worker process and makes its record: `echo`, `rows`, `train`, `wire` (the kind
`bytes`), `network`, `restart`. The worker is the client and starts the servers (`processes`); `tables` has the table,
`batches` what Paddle's parameter server (`paddle`, `paddle_role`) gets as well. `network` has several machines:
`machines` creates them from network namespaces, `switch` forwards their packets by the rules of `link`, `probe`
measures what that carries, `trainer` is a trainer on one of them.
"""
