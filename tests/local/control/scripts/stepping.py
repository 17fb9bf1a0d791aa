"""A training script without torch: takes steps until it is told to stop, and then says at which.

Arguments: how many steps at most; optionally the port of a hub, see workers.py, which every step goes through like a
collective.
"""

from __future__ import annotations

import socket
import sys

from slurm_elastic import trainer


def main() -> None:
    steps = int(sys.argv[1])
    hub = socket.create_connection(("127.0.0.1", int(sys.argv[2]))) if len(sys.argv) > 2 else None
    print("ready", flush=True)
    for step in range(1, steps + 1):
        if hub is not None:
            hub.sendall(b"x")
            if not hub.recv(1):
                sys.exit("the hub is gone")
        if stop := trainer.should_stop(step):
            print(f"{stop.reason} {step}", flush=True)
            return
    print(f"end {steps}", flush=True)


if __name__ == "__main__":
    main()
