"""Three etcd members with TLS and authentication, for a program that runs elsewhere in the network.

    python members.py ADDRESS DIRECTORY

Says "ready" when clients can come; their credentials are in DIRECTORY then. Takes commands, a line each, and answers
"done": `kill 0` ends a member at once, `settle` waits until the others have a leader, `start` starts all that are down.
Ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slurm_elastic.rendezvous.records.etcd.client import EtcdClient
from slurm_elastic.rendezvous.records.etcd.server import find_binary
from tests.local.etcd.helpers.cluster import Cluster

_SETTLE_SECONDS = 30.0


def main(address: str, directory: Path) -> None:
    cluster = Cluster(directory, find_binary(), host=address)
    config = cluster.config
    assert config.ca_cert
    assert config.ssl_cert
    assert config.ssl_cert_key
    file = directory / "credentials.json"
    found = {
        "endpoint": str(config),
        "ca_cert": config.ca_cert.name,
        "ssl_cert": config.ssl_cert.name,
        "ssl_cert_key": config.ssl_cert_key.name,
        "user": config.user,
        "password": config.password,
    }
    file.write_text(json.dumps(found))
    file.chmod(0o600)
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            match line.split():
                case ["kill", number]:
                    cluster.members[int(number)].kill()
                case ["settle"]:
                    with EtcdClient(config) as client:
                        client.limited(_SETTLE_SECONDS).connect()
                case ["start"]:
                    cluster.start()
            print("done", flush=True)
    finally:
        cluster.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
