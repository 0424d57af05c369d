"""One round of one case in a process of its own: `python -m benchmarks.cluster.worker '<job as JSON>'`.

The last line of stdout is the result as JSON; a job that fails ends with a traceback and a non-zero exit status.
"""

import json
import sys

from benchmarks.cluster.kinds import KINDS


def main() -> None:
    job = json.loads(sys.argv[1])
    print(json.dumps(KINDS[job["kind"]].measure(job)), flush=True)


if __name__ == "__main__":
    main()
