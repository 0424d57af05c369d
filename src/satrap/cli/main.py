"""The commands of `satrap`. `run` runs a script on a cluster, `scale` changes its number of servers, `status` shows
what it does, and `report` what it did; `plan` finds machines for a job; `keys`, `server`, `worker` and `migrate` are
for a cluster that is managed by hand; `doctor` checks this machine.

Carries out the commands that `parser` reads, and prints plain lines.
"""

import argparse
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from satrap.cli.parser import command_parser
from satrap.config.validation import check_integer
from satrap.errors import ConfigError, SatrapError
from satrap.event_log import event, formatter, set_role
from satrap.run_context import RunContext

_LOG = logging.getLogger("satrap.cli")
_RERUN_HINT = "; run the same command again to finish the migration"
_MAX_OPEN_FILES = 1 << 16  # of a server or worker: one for each connection
_NUM_CALL_THREADS = 4  # threads of a worker that receive calls and pass them to its sessions


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = command_parser()
    own_arguments, script_arguments = _split_arguments(sys.argv[1:] if arguments is None else arguments)
    options, unrecognized = parser.parse_known_args(own_arguments)
    if options.command is None:
        parser.exit(2, parser.format_help())
    if unrecognized:
        hint = "; put the script's own arguments after --" if options.command in ("run", "plan") else ""
        parser.error(f"unrecognized arguments: {' '.join(unrecognized)}{hint}")
    if options.command in ("server", "worker", "trainer", "migrate"):
        set_role(options.command, getattr(options, "number", None))
        _show_log(options.log_format)
    try:
        if options.die_with is not None:
            from satrap.launch.child_processes import die_with_parent

            die_with_parent(options.die_with)
        if options.command == "run":
            from satrap.cli.run_command import run_script

            return run_script(options, script_arguments)
        if options.command == "plan":
            from satrap.cli.plan_command import print_plan

            return print_plan(options, script_arguments)
        if options.command != "trainer":  # a script's own errors are not caught here
            for line in _output_lines(options):
                print(line, flush=True)
            return 0
    except OSError as error:  # the reader has closed the pipe, as in `satrap doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"satrap: {error}", file=sys.stderr)
        return 1
    except SatrapError as error:
        print(f"satrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"satrap: interrupted{_RERUN_HINT if options.command == 'migrate' else ''}", file=sys.stderr)
        return 130
    from satrap.cli.http import serve_trainer
    from satrap.launch.trainer_main import run_trainer

    context = RunContext.from_dict(json.loads(options.context))
    with serve_trainer(options.http, context.rank):
        run_trainer(context, options.script, script_arguments, options.listener, options.record)
    return 0


def _output_lines(options: argparse.Namespace) -> Iterator[str]:
    """Returns the output of a command that prints lines."""
    match options.command:
        case "doctor":
            from satrap.cli.doctor import examine

            return examine(options.dim, run=not options.no_run)
        case "keys":
            return _keys(options.folder)
        case "scale":
            return _scale(options.folder, options.servers)
        case "status":
            return _status(options)
        case "report":
            return _report(options)
        case "migrate":
            return _migrate(options.current, options.target, options.keys)
        case "worker":
            return _worker(options)
        case _:
            return _server(options)


def _show_log(log_format: str) -> None:
    """Shows Satrap's log on standard error, unless the script configures logging."""
    handler, logger = logging.StreamHandler(), logging.getLogger("satrap")
    handler.setFormatter(formatter(log_format))
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before and after the first "--"."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _scale(folder: Path, servers: int) -> Iterator[str]:
    from satrap.launch.scaler import request_servers

    request_servers(folder, check_integer("scale", "servers", servers, 1, 65535))
    yield f"number of servers requested: {servers}; the output of the run reports the result"


def _status(options: argparse.Namespace) -> Iterator[str]:
    """Prints the status itself, since a terminal is drawn in place."""
    from satrap.cli.status import RunReader, show_status
    from satrap.rpc import Keys

    keys = None if options.keys is None else Keys.read(options.keys)
    folder = None if options.servers else options.folder
    with (
        suppress(*([KeyboardInterrupt] if options.watch else [])),  # the way to end --watch
        RunReader(folder, options.servers or (), keys) as reader,
    ):
        show_status(reader, watch=options.watch, as_json=options.json, seconds=options.seconds)
    yield from ()


def _report(options: argparse.Namespace) -> Iterator[str]:
    from satrap.cli.report import write_report

    yield write_report(options.folder, options.output)


def _migrate(current: Sequence[str], target: Sequence[str], keys: str | None) -> Iterator[str]:
    from satrap.rpc import Keys
    from satrap.server.migration.coordinator import Migration

    result = Migration(current, target, keys=None if keys is None else Keys.read(keys)).run()
    yield (
        f"migrated {result.buckets} buckets ({result.rows:,} rows, {result.bytes / 2**20:,.0f} MiB) in "
        f"{result.seconds:.1f} s; no bucket was frozen for more than {result.longest_frozen_seconds:.2f} s"
    )


def _keys(folder: str) -> Iterator[str]:
    if not folder:
        raise ConfigError("the directory is ''; expected the path of a directory for the two key files")
    from satrap.rpc.keys import create_keys

    for path in create_keys(folder):
        yield f"{path}: created, readable only by you; copy it to every {path.stem} over a secure channel"


def _server(options: argparse.Namespace) -> Iterator[str]:
    from satrap.cli.http import StatusEndpoint
    from satrap.rpc import Keys, Limits, Origin, Service
    from satrap.server.protocol import ServerCalls
    from satrap.server.server import Server
    from satrap.server.status_calls import server_samples

    wait_for_stop = _install_stop_handler()
    _prepare_to_listen(options)
    keys = None if options.keys is None else Keys.read(options.keys)
    server = Server(shared=options.shared, num_threads=options.threads, checkpoints=options.checkpoints)
    limits = Limits(max_bytes=16 << 30)  # the parts of all trainers wait until the last one has arrived
    with (
        StatusEndpoint("server", options.http, lambda: server.status(Origin()), server_samples) as endpoint,
        Service(server, ServerCalls, options.listen, keys, insecure=options.insecure, limits=limits) as service,
    ):
        yield from endpoint.attach(service)
        yield f"satrap server: listening at {service.address}"
        _log_start(service.address)
        wait_for_stop()
        endpoint.drain()
    _LOG.info("stopped", extra=event("stopped"))


def _worker(options: argparse.Namespace) -> Iterator[str]:
    from satrap.cli.http import StatusEndpoint
    from satrap.rpc import Keys, Origin, Service
    from satrap.worker.remote.protocol import WorkerCalls
    from satrap.worker.remote.service import WorkerService, worker_samples

    wait_for_stop = _install_stop_handler()
    _prepare_to_listen(options)
    keys = None if options.keys is None else Keys.read(options.keys)
    client_keys = None if options.keys is None else Keys.read(Path(options.keys).with_name("client.key"))
    service_options: dict[str, Any] = {"insecure": options.insecure, "num_threads": _NUM_CALL_THREADS}
    with (
        closing(WorkerService(keys=client_keys, num_threads=options.threads, data=options.data)) as served,
        StatusEndpoint("worker", options.http, lambda: served.status(Origin()), worker_samples) as endpoint,
        Service(served, WorkerCalls, options.listen, keys, **service_options) as service,
    ):
        yield from endpoint.attach(service)
        yield f"satrap worker: listening at {service.address}"
        _log_start(service.address)
        wait_for_stop()
        endpoint.drain()
    _LOG.info("stopped", extra=event("stopped"))


def _log_start(address: str) -> None:
    text = "started: satrap %s, process %d, listening at %s"
    _LOG.info(text, version("satrap"), os.getpid(), address, extra=event("started", pid=os.getpid(), address=address))


def _prepare_to_listen(options: argparse.Namespace) -> None:
    if options.insecure and options.keys is not None:
        raise ConfigError("both --keys and --insecure were given; expected one of them: remove --insecure")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def _install_stop_handler() -> Callable[[], object]:
    """Handles SIGTERM and Ctrl-C from now on, and returns a function that waits for the next one.

    A handler that sets an Event would not be enough: if the signal arrives just before the waiter falls asleep, the
    waiter does not wake up.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return partial(os.read, reader, 1)
