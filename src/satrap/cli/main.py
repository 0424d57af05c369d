"""The commands of `satrap`. `train` trains a model on a file without code; `run` runs a script on a cluster, `scale`
changes its number of servers, `status` shows what it does, and `report` what it did; `import` saves pretrained vectors
as a table's snapshot; `plan` finds machines for a job; `deploy` writes manifests for Kubernetes; `keys`, `server`,
`worker` and `migrate` are for a cluster that is managed by hand, and `trainer` runs a script on it; `doctor` checks
this machine; `completion` prints a script for a shell.

Carries out the commands that `parser` reads, and prints plain lines.
"""

import argparse
import errno
import logging
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from satrap.byte_sizes import format_bytes
from satrap.cli.options import separators_in
from satrap.cli.parser import command_parser
from satrap.config.validation import check_integer, check_number
from satrap.errors import ConfigError, SatrapError
from satrap.event_log import event, formatter, set_role

_LOG = logging.getLogger("satrap.cli")
_RERUN_HINT = "; run the same command again to finish the migration"
_NUM_CALL_THREADS = 4  # threads of a worker that receive calls and pass them to its sessions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = command_parser()
    own_arguments, script_arguments = _split_arguments(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(own_arguments)
    if options.command is None:
        parser.exit(2, parser.format_help())
    if options.command in ("server", "worker", "trainer", "migrate"):
        set_role(options.command, getattr(options, "number", None))
        _show_log(options.log_format)
    try:
        if _needs_torch(options) and find_spec("torch") is None:
            raise ConfigError(f"satrap {options.command} needs torch: pip install 'satrap[train]'")
        if options.die_with is not None:
            from satrap.launch.child_processes import die_with_parent

            die_with_parent(options.die_with)
        if options.command == "run":
            from satrap.cli.run_command import run_script

            return run_script(options, script_arguments)
        if options.command == "plan":
            from satrap.cli.plan_command import print_plan

            return print_plan(options, script_arguments)
        if options.command == "trainer":
            from satrap.cli.trainer_command import check_trainer, run_script_as_trainer

            check_trainer(options)
        else:
            for line in _output_lines(options):
                print(line, flush=True)
            return 0
    except OSError as error:  # the reader has closed the pipe, as in `satrap doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            advice = "; raise the limit, see `ulimit -n`" if error.errno == errno.EMFILE else ""
            print(f"satrap: {error}{advice}", file=sys.stderr)
        return 1
    except SatrapError as error:
        print(f"satrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"satrap: interrupted{_RERUN_HINT if options.command == 'migrate' else ''}", file=sys.stderr)
        return 130
    run_script_as_trainer(options, script_arguments)  # the script's own errors are not caught
    return 0


def _output_lines(options: argparse.Namespace) -> Iterator[str]:
    """Return the output of a command that prints lines."""
    match options.command:
        case "doctor":
            from satrap.cli.doctor import examine, examine_data

            if options.files:
                return examine_data(
                    options.files,
                    options.ids,
                    split=separators_in(options.split),
                    batch_size=options.batch_size,
                    num_batches=options.batches,
                    max_bad_rows=options.max_bad_rows,
                )
            if options.ids or options.split:
                named = "--ids" if options.ids else "--split"
                raise ConfigError(f"doctor {named} without FILES: name the files whose columns these are")
            return examine(options.dim, run=not options.no_run)
        case "train":
            from satrap.cli.train_command import train_model

            return train_model(options)
        case "import":
            from satrap.cli.import_command import import_vectors

            return import_vectors(options)
        case "keys":
            return _keys(options.folder)
        case "scale":
            return _scale(options.folder, options.servers)
        case "status":
            return _status(options)
        case "report":
            return _report(options)
        case "deploy":
            from satrap.cli.deploy_command import render

            return render(options)
        case "migrate":
            return _migrate(options.current, options.target, options.keys)
        case "completion":
            from satrap.cli.completion import completion_script

            return iter([completion_script(options.shell, command_parser())])
        case "worker":
            return _worker(options)
        case _:
            return _server(options)


def _needs_torch(options: argparse.Namespace) -> bool:
    """Return whether the command trains on this machine, itself or in a child."""
    match options.command:
        case "plan":
            return bool(options.calibrate or (options.job is not None and options.job.suffix != ".toml"))
        case "run":
            return bool(options.cluster == "local")
        case "train":
            return options.script is None
        case command:
            return bool(command == "trainer")


def _show_log(log_format: str) -> None:
    """Show Satrap's log on standard error, unless the script configures logging."""
    handler, logger = logging.StreamHandler(), logging.getLogger("satrap")
    handler.setFormatter(formatter(log_format))
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after the first "--"."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _scale(folder: Path, servers: int) -> Iterator[str]:
    from satrap.launch.scaler import request_servers

    request_servers(folder, check_integer("scale", "servers", servers, 1, 65535))
    yield f"number of servers requested: {servers}; the output of the run reports the result"


def _status(options: argparse.Namespace) -> Iterator[str]:
    """Print the status itself, since a terminal is drawn in place."""
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

    yield write_report(options.folder, options.output, options.other)


def _migrate(current: Sequence[str], target: Sequence[str], keys: Path | None) -> Iterator[str]:
    from satrap.rpc import Keys
    from satrap.server.migration.coordinator import Migration

    result = Migration(current, target, keys=None if keys is None else Keys.read(keys)).run()
    yield (
        f"migrated {result.buckets} buckets ({result.rows:,} rows, {format_bytes(result.bytes)}) in "
        f"{result.seconds:.1f} s; no bucket was frozen for more than {result.longest_frozen_seconds:.2f} s"
    )


def _keys(folder: Path) -> Iterator[str]:
    from satrap.rpc.keys import create_keys

    for path in create_keys(folder):
        yield f"{path}: created, readable only by you; copy it to every {path.stem} over a secure channel"


def _server(options: argparse.Namespace) -> Iterator[str]:
    from satrap.cli.http import StatusEndpoint
    from satrap.rpc import Client, Keys, Limits, Origin, Service
    from satrap.rpc.address import advertised_address
    from satrap.server.migration.arrival import Arrival
    from satrap.server.migration.departure import Departure
    from satrap.server.protocol import ServerCalls
    from satrap.server.server import Server
    from satrap.server.status import server_samples

    wait_for_stop = _StopSignals()
    _check_listening(options)
    keys = None if options.keys is None else Keys.read(options.keys)
    client_keys = None
    moves = options.on_stop == "move"
    if (moves or options.join) and keys is not None:
        client_keys = Keys.read(options.keys.with_name("client.key"))
    check_number("server", "grace", options.grace, 0.0)
    for address in options.join:  # an address that cannot be called is an error now
        Client(ServerCalls, address, keys=client_keys).close()
    server = Server(shared=options.shared, num_threads=options.threads, checkpoints=options.checkpoints)
    limits = Limits(max_bytes=16 << 30)  # the parts of all trainers wait until the last one has arrived
    with (
        StatusEndpoint("server", options.http, lambda: server.status(Origin()), server_samples) as endpoint,
        Service(server, ServerCalls, options.listen, keys, insecure=options.insecure, limits=limits) as service,
    ):
        yield from endpoint.attach(service)
        yield from _announce("server", options.advertise, service.address)
        own = advertised_address(options.advertise, service.address)
        arrival = Arrival(server.status, own, options.join, client_keys)
        arrival.start()
        number = wait_for_stop()
        arrival.close()
        endpoint.drain()
        if moves and number == signal.SIGTERM:
            departure = Departure(server, client_keys, options.grace)
            departure.start(wait_for_stop.end)
            wait_for_stop(options.grace)  # or a second signal
            departure.report()
    _LOG.info("stopped", extra=event("stopped"))


def _worker(options: argparse.Namespace) -> Iterator[str]:
    from satrap.cli.http import StatusEndpoint
    from satrap.rpc import Keys, Origin, Service
    from satrap.worker.remote.protocol import WorkerCalls
    from satrap.worker.remote.service import WorkerService, worker_samples

    wait_for_stop = _StopSignals()
    _check_listening(options)
    keys = None if options.keys is None else Keys.read(options.keys)
    client_keys = None if options.keys is None else Keys.read(options.keys.with_name("client.key"))
    service_options: dict[str, Any] = {"insecure": options.insecure, "num_threads": _NUM_CALL_THREADS}
    with (
        closing(WorkerService(keys=client_keys, num_threads=options.threads, data=options.data)) as served,
        StatusEndpoint("worker", options.http, lambda: served.status(Origin()), worker_samples) as endpoint,
        Service(served, WorkerCalls, options.listen, keys, **service_options) as service,
    ):
        yield from endpoint.attach(service)
        yield from _announce("worker", options.advertise, service.address)
        wait_for_stop()
        endpoint.drain()
    _LOG.info("stopped", extra=event("stopped"))


def _announce(role: str, advertise: str | None, bound: str) -> Iterator[str]:
    """Print and log the address by which to call this server or worker."""
    from satrap.rpc.address import advertised_address

    address = advertised_address(advertise, bound)
    yield f"satrap {role}: listening at {address}"
    text = "started: satrap %s, process %d, listening at %s"
    _LOG.info(text, version("satrap"), os.getpid(), address, extra=event("started", pid=os.getpid(), address=address))


def _check_listening(options: argparse.Namespace) -> None:
    from satrap.rpc.address import advertised_address
    from satrap.rpc.service import require_protection

    require_protection(options.listen, has_keys=options.keys is not None, insecure=options.insecure)
    advertised_address(options.advertise, options.listen)
    if options.insecure and options.keys is not None:
        raise ConfigError("both --keys and --insecure were given; expected one of them: remove --insecure")


class _StopSignals:
    """Handles SIGTERM and Ctrl-C from now on. Called, waits for the next one.

    A handler that sets an Event would not be enough: if the signal arrives just before the waiter falls asleep, the
    waiter does not wake up.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def __call__(self, seconds: float | None = None) -> int | None:
        """Return the number of the signal; None if none came in so many seconds, or `end` was called."""
        if not select.select([self._reader], [], [], seconds)[0]:
            return None
        return os.read(self._reader, 1)[0] or None

    def end(self) -> None:
        """End a wait, from another thread."""
        os.write(self._writer, b"\0")
