"""A run: its servers, workers and trainers as processes that one supervisor starts, and starts again.

supervisor   decides: events in, orders out           membership   what it decided, on disk before it is used
run          does what it decides, with a launcher    command      what a process is, where it is started
children     processes of this one, watched           output       what they write
processes    the launcher of this machine             rays         the launcher of a Ray cluster
resources    what is asked of one, for each role      trainer      what a trainer does before the script
"""
