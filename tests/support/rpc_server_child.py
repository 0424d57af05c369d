"""`python rpc_server_child.py ADDRESS [limit=number ...] [files=number] [keys=FILE]` prints its address and serves
`Served` until the end of stdin."""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rpc_parts import Calls, Served
from satrap.rpc import Keys, Limits, Service

if __name__ == "__main__":
    settings = dict(each.split("=", 1) for each in sys.argv[2:])
    keys = Keys.read(settings.pop("keys")) if "keys" in settings else None
    if "files" in settings:
        files = int(settings.pop("files"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    limits = Limits(**{name: int(value) for name, value in settings.items()})
    with Service(Served(), Calls, sys.argv[1], keys, insecure=keys is None, limits=limits) as service:
        print(service.address, flush=True)
        sys.stdin.read()
