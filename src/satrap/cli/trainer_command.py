"""`satrap trainer`: runs a script as one trainer, of a run or of a group that torchrun started."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from satrap.cli.http import serve_trainer
from satrap.errors import ConfigError
from satrap.monitor.endpoint import next_port
from satrap.run_context import RunContext


def check_trainer(options: argparse.Namespace) -> None:
    """Raise ConfigError unless the options name servers and a script that exists: before the trainers wait for each
    other."""
    if options.context is not None:
        return
    if not options.servers:
        raise ConfigError("trainer: --servers is missing; expected the addresses of all servers, in order")
    if not Path(options.script).is_file():
        raise ConfigError(f"trainer: there is no script {options.script!r}; expected the path of a Python file")


def run_script_as_trainer(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Run the script with these arguments to its end. Its own errors are not caught here."""
    from satrap.launch.trainer_main import join_torchrun, run_trainer

    http = options.http
    if options.context is not None:
        context = RunContext.from_dict(json.loads(options.context))
    else:
        rank, world_size, local_rank, rendezvous = join_torchrun()
        http = None if http is None else next_port(http, local_rank)
        context = RunContext(
            rank=rank,
            world_size=world_size,
            launch=0,
            servers=options.servers,
            workers=options.workers,
            keys=options.keys,
            rendezvous=rendezvous,
            clear=options.clear,
        )
    with serve_trainer(http, context.rank):
        run_trainer(context, options.script, arguments, options.listener, options.record)
