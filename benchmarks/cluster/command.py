"""The server of the kinds that look rows up: the command `satrap server`, in a process of its own as for its users."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cluster.processes import end

ANYWHERE = "tcp://127.0.0.1:0"


@contextmanager
def satrap_server(
    num_threads: int,
    listen: str = ANYWHERE,
    options: Sequence[str] = (),
    elsewhere: Callable[[Sequence[str]], Sequence[str]] = list,
) -> Iterator[tuple[str, int]]:
    """Where an empty server listens, on a free port, and its process id; it is gone afterwards, and its rows.

    options: more of the command's; without --keys everybody on this machine may call it. elsewhere: makes of a command
    one that runs on another machine.
    """
    command = [str(Path(sys.executable).with_name("satrap")), "server", "--listen", listen, *options]
    command += ["--threads", str(num_threads), *([] if "--keys" in options else ["--insecure"])]
    process = subprocess.Popen(elsewhere(command), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline().split()
        if not said:
            raise RuntimeError(f"satrap server ended before it listened, with exit status {process.wait()}")
        yield said[-1], process.pid
    finally:
        process.terminate()
        process.stdout.close()
        end(process)
