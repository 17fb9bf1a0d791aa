"""Waits for the first TCP connection from an address, and prints when it was opened, by the kernel's clock.

    nsenter --net=/run/netns/MACHINE python -m benchmarks.first_connection ADDRESS

Run in the network namespace of the machine that is connected to. Prints "ready" first. Polling would see a connection
late on a busy machine, and what follows it takes only a tenth of a second.
"""

import socket
import struct
import sys

_ETH_P_IP = 0x0800
_SO_TIMESTAMPNS = 35
"""socket(7); Python's module has no name for it. The same number on all common architectures."""
_SLURMD = 6818
"""Port of slurmd, which Slurm's own messages go to."""


def main() -> None:
    """Wait and print."""
    peer = socket.inet_aton(sys.argv[1])
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_IP)) as packets:
        packets.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        print("ready", flush=True)
        while True:
            packet, control, _, _ = packets.recvmsg(128, socket.CMSG_SPACE(16))
            if packet[9] == socket.IPPROTO_TCP and packet[12:16] == peer and _opens(packet[(packet[0] & 15) * 4 :]):
                seconds, nanoseconds = struct.unpack("qq", control[0][2])
                print(seconds + nanoseconds / 1e9, flush=True)
                return


def _opens(segment: bytes) -> bool:
    (port,) = struct.unpack_from("!H", segment, 2)
    syn, ack = segment[13] & 2, segment[13] & 16
    return bool(syn) and not ack and port != _SLURMD


if __name__ == "__main__":
    main()
