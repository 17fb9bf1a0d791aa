"""Asks health ports whether they are alive until there is `asked`: a line `<node> <status> <milliseconds>` for each.

asking.py HOST:PORT ...
"""

from __future__ import annotations

import http.client
import sys
import time
from pathlib import Path

while not Path("asked").exists():
    for target in sys.argv[1:]:
        host, _, port = target.partition(":")
        begin = time.monotonic()
        try:
            connection = http.client.HTTPConnection(host, int(port), timeout=10)
            connection.request("GET", "/healthz")
            status = str(connection.getresponse().status)
            connection.close()
        except OSError as error:
            status = type(error).__name__
        print(host, status, f"{(time.monotonic() - begin) * 1000:.1f}", flush=True)
    time.sleep(0.02)
