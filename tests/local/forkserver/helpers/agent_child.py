"""The main module of a process that a fork server forks for the agent; it tells what it has inherited."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path


def main(descriptor: int) -> None:
    blocked = [signal.Signals(number).name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    files = {int(path.name): str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    with socket.socket(fileno=descriptor) as agent:
        # libffi keeps its own file open for the code of callbacks (src/tramp.c, 3.5), whoever calls it by ctypes.
        own = {
            number: name
            for number, name in files.items()
            if name != f"/proc/{os.getpid()}/fd" and not Path(name).name.startswith("libffi.so")
        }
        told = {"blocked": blocked, "files": sorted(own), "output": own[1], "socket": descriptor}
        agent.send(json.dumps({**told, "session": os.getsid(0) == os.getpid()}).encode())
        agent.recv(1)
