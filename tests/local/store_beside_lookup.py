"""Serves a store while another thread is held up where glibc reads resolv.conf, with a lock that forks copy.

Run this in a mount namespace of its own, as root.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from slurm_elastic.rendezvous.worker_store import prepare_stores, serve_store
from tests.local.waiting import HANG

RESOLV_CONF = "/etc/resolv.conf"
# This process would wait for the lock.
CLIENT = """
import faulthandler, sys
faulthandler.dump_traceback_later(60)
from torch._C._distributed_c10d import TCPStore
client = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
client.set("key", "value")
print(client.get("key").decode())
"""


def is_held_up(thread: threading.Thread) -> bool:
    # anon_pipe_read from Linux 6.14 on, else pipe_read or pipe_wait.
    return "pipe" in Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()


fifo = Path(tempfile.mkdtemp()) / "fifo"
os.mkfifo(fifo)
prepare_stores()
# So that the thread is held up where it reads, and not where it opens: who is stopped and continued, or frozen, while
# it opens a file begins again, and would find the other resolv.conf.
writer = os.open(fifo, os.O_RDWR)
# Where it hangs is told before its test gives it up.
faulthandler.dump_traceback_later(HANG - 10, exit=True)
subprocess.run(["mount", "--bind", fifo, RESOLV_CONF], check=True)
thread = threading.Thread(target=socket.getaddrinfo, args=("localhost", 80), daemon=True)
thread.start()
while not is_held_up(thread):
    time.sleep(0.01)
subprocess.run(["umount", "--lazy", RESOLV_CONF], check=True)
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
listener.setblocking(False)
served = serve_store("127.0.0.1", port, listener.detach())
code = subprocess.run([sys.executable, "-c", CLIENT, str(port)], check=False).returncode
os.close(writer)
thread.join()
served.close()
shutil.rmtree(fifo.parent)
sys.exit(code)
