"""A run: its servers, workers and trainers as processes that one supervisor starts, and starts again.

- `supervisor` decides: events in, orders out. `membership` is what it decided, on disk before it is used.
- `run` does what it decides, with a launcher and a resizer. `processes` is the launcher of this machine, `resizer` has
  more servers or fewer while it trains, `output` shows what the processes write.
- `trainer` is what a trainer's process does before the script.
"""
