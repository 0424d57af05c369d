"""`python rpc_server_child.py ADDRESS [limit=number ...]` prints its address and serves `Served` until stdin ends."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rpc_parts import Calls, Served
from satrap.rpc import Limits, Service

if __name__ == "__main__":
    limits = {name: int(value) for name, _, value in (each.partition("=") for each in sys.argv[2:])}
    with Service(Served(), Calls, sys.argv[1], insecure=True, limits=Limits(**limits)) as service:
        print(service.address, flush=True)
        sys.stdin.read()
