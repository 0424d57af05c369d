"""The options of the commands that start one process of a run: server, worker, trainer."""

import argparse

from satrap.cli.options import (
    Commands,
    add_choice,
    add_http,
    add_keys,
    add_log_format,
    add_names,
    add_number,
    add_path,
    add_permitted,
)

_THREADS = "threads for each call (default: number of cores)"
_BELOW = "below this folder or URL; may be repeated (default: nowhere)"


def add_server(commands: Commands) -> None:
    server = commands.add_parser(
        "server",
        help="start one embedding parameter server",
        description="Start one embedding parameter server. It prints its address, takes its tables from the first "
        "trainer, and runs until SIGTERM or Ctrl-C. ('satrap run' starts servers by itself.)",
    )
    _add_listen(server, "path of server.key; required for tcp:// without --insecure")
    add_path(
        server,
        "--shared",
        "keep the rows in this shared-memory file, and continue with the rows that it already has, for example "
        "/dev/shm/rows (default: rows are lost when the server exits)",
    )
    add_choice(
        server,
        "--on-stop",
        "what happens to the rows at SIGTERM. keep: rows stay in the file of --shared, for the next server with "
        "this file. move: the server first moves its rows to the other servers, while training continues; with --keys, "
        "this needs client.key in the same folder",
        ("keep", "move"),
    )
    server.add_argument(
        "--grace",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="time for --on-stop move, after which the server ends with the rows that it still has (default: "
        "%(default)g, since Kubernetes kills a pod after 30)",
    )
    add_names(
        server,
        "--join",
        "addresses of the job's servers: if they train without this server when it starts, it takes an equal "
        "share of their buckets, while training continues; with --keys, this needs client.key in the same directory "
        "(default: it stays empty until satrap migrate or a trainer gives it buckets)",
    )
    add_http(server, "")
    add_permitted(server, "--checkpoints", f"write and read checkpoints {_BELOW}")
    add_number(server, "--threads", _THREADS)
    add_number(server, "--number", "number of this process in its log (default: that of the server in its job)")
    add_log_format(server)


def add_worker(commands: Commands) -> None:
    worker = commands.add_parser(
        "worker",
        help="start one embedding worker",
        description="Start one embedding worker, which reads data and looks up rows for trainers. It prints its "
        "address and runs until SIGTERM or Ctrl-C. ('satrap run' starts workers by itself.)",
    )
    _add_listen(
        worker, "path of server.key, with client.key in the same folder; required for tcp:// without --insecure"
    )
    add_http(worker, "")
    add_permitted(worker, "--data", f"read training data {_BELOW}")
    add_number(worker, "--threads", _THREADS)
    add_number(worker, "--number", "number of this process in its log (default: none)")
    add_log_format(worker)


def add_trainer(commands: Commands) -> None:
    trainer = commands.add_parser(
        "trainer",
        help="run a training script on servers that were started by hand",
        usage="satrap trainer SCRIPT --servers ADDRESS [ADDRESS ...] [options] [-- ARGUMENTS]",
        description="Run a training script in this process, as one trainer on servers that were started by hand. The "
        "script is the same as for 'satrap run'. For several trainers, start this command with torchrun. ('satrap "
        "run' starts trainers by itself.)",
        epilog="Example: torchrun --nproc-per-node 8 -m satrap trainer train.py --servers tcp://10.0.0.5:5555 -- "
        "--epochs 3",
    )
    trainer.add_argument("script", metavar="SCRIPT", help="Python file to run; it receives the arguments after --")
    add_names(trainer, "--servers", "addresses of all servers, in the same order for every trainer; required")
    add_names(trainer, "--workers", "addresses of all workers (default: none)")
    add_keys(trainer)
    trainer.add_argument(
        "--clear",
        action="store_true",
        help="if the script resumes no checkpoint, remove the rows that the servers have from an earlier start "
        "(default: refuse to train on such rows)",
    )
    add_http(trainer, "; each further trainer of a machine takes the next port")
    add_log_format(trainer)
    trainer.add_argument("--context", help=argparse.SUPPRESS)  # from `satrap run`
    trainer.add_argument("--listener", type=int, help=argparse.SUPPRESS)


def _add_listen(command: argparse.ArgumentParser, keys: str) -> None:
    command.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="address to listen at: ipc:///folder/name, a Unix socket in a folder of mode 0700, or "
        "tcp://10.0.0.5:5555; port 0 chooses a free port",
    )
    command.add_argument(
        "--advertise",
        metavar="ADDRESS",
        help="address for other processes, if it differs from --listen: a name that stays the same when the machine or "
        "pod is replaced, such as tcp://server-0.jobs:5555; port 0 stands for the port of --listen (default: --listen)",
    )
    add_path(command, "--keys", keys)
    command.add_argument(
        "--insecure",
        action="store_true",
        help="serve tcp:// without keys: anyone who can reach the port can read and change rows, read the allowed "
        "files and stop the job; traffic is not encrypted",
    )
