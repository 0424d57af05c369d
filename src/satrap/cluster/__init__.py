"""A run: its servers, workers and trainers as processes that one supervisor starts, and starts again.

- `supervisor` decides: events in, orders out. `membership` is what it decided, on disk before it is used.
- `run` does what it decides, with a launcher and a resizer. `processes` is the launcher of this machine, `rays` that of
  a Ray cluster, where `resources` are asked for. `resizer` has more servers or fewer while it trains.
- `command` is what a process is and where, `children` watches processes of this one, `output` shows what they write, on
  a `terminal` that may be paused.
- `trainer` is what a trainer's process does before the script.
"""
