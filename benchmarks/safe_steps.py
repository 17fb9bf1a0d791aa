"""Asks an agent's health port every 20 ms which step is safe; prints a line `<seconds since 1970> <step>` per change.

    nsenter --net=/run/netns/MACHINE python -m benchmarks.safe_steps HOST:PORT

Run in the network namespace of the agent's machine. Ends when the agent does not answer.
"""

import http.client
import re
import sys
import time

_SAFE = re.compile(r"^slurm_elastic_snapshot_safe_step\S* (\d+)", re.MULTILINE)


def main() -> None:
    """Ask and print."""
    connection, known = http.client.HTTPConnection(sys.argv[1], timeout=10), None
    while True:
        try:
            connection.request("GET", "/metrics")
            found = _SAFE.search(connection.getresponse().read().decode())
        except (OSError, http.client.HTTPException):
            return
        if found is not None and found[1] != known:
            print(time.time(), found[1], flush=True)
            known = found[1]
        time.sleep(0.02)


if __name__ == "__main__":
    main()
