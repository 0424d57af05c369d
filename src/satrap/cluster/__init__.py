"""A run: its servers, workers and trainers as processes that one supervisor starts, and starts again.

supervisor   decides: events in, orders out           membership   what it decided, on disk before it is used
run          does what it decides, with a launcher    processes    the launcher of this machine
trainer      what a trainer's process does before the script
"""
