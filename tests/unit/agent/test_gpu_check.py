"""The check of GPUs: recorded output of nvidia-smi, and records of the kernel log."""

from __future__ import annotations

import pytest

from slurm_elastic.agent.node.node_check import gpu_problems, gpu_shortcomings, xid_shortcomings

# Written after the format that nvidia-smi --help-query-gpu documents, not recorded: GPUs that remap rows, such as an
# H200; that retire pages, such as a T4; and that have no ECC, such as a GeForce.
H200 = "0, 0, 0, [N/A]\n1, 0, 0, [N/A]\n"
T4 = "0, 0, [N/A], No\n"
GEFORCE = "0, [N/A], [N/A], [N/A]\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (H200 + T4 + GEFORCE, []),
        ("0, 0, 0, [N/A]\n7, 2, 0, [N/A]\n", ["GPU 7 has 2 uncorrectable ECC errors since its last reset"]),
        ("3, 0, Yes, [N/A]\n", ["GPU 3 cannot remap a broken row of its memory"]),
        ("3, 0, 1, [N/A]\n", ["GPU 3 cannot remap a broken row of its memory"]),
        ("0, 0, [N/A], Yes\n", ["GPU 0 waits for a reset to retire a page of its memory"]),
        (
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover\n",
            [
                "nvidia-smi: Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  "
                "Reboot the system to recover"
            ],
        ),
        # A job without GPUs on a node that has some, and a driver that is not loaded: nothing is known.
        ("No devices were found\n", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
        ('Field "remapped_rows.failure" is not a valid field to query.\n', []),
        ("0, 0, 0\n, , , \nx, 1, 1, 1\n\x00\n", []),
        ("", []),
    ],
)
def test_the_counters_of_gpus(output: str, found: list[str]) -> None:
    assert gpu_shortcomings(output) == found


def xid(number: int, at: float = 5000.0) -> str:
    thread = "[  T812]" if number == 48 else ""
    return f"<4>[ {at:.6f}]{thread} NVRM: Xid (PCI:0000:3b:00): {number}, pid='<unknown>', name=<unknown>, text.\n"


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (xid(79), ["GPU PCI:0000:3b:00 had Xid 79 (it has fallen off the bus) 1 times in an hour"]),
        (xid(48) * 2, ["GPU PCI:0000:3b:00 had Xid 48 (a double-bit ECC error) 2 times in an hour"]),
        # Errors of scripts, one that is older than an hour, and other lines.
        (xid(13) + xid(31) + xid(43), []),
        (xid(79, at=1000.0), []),
        ("<6>[ 5000.000000] task=NVRM: Xid (PCI:0000:3b:00): 79\n", []),
        ("", []),
    ],
)
def test_xid_errors_in_the_kernel_log(log: str, found: list[str]) -> None:
    assert xid_shortcomings("<6>[    0.000000] Linux version\n" + log, 5100.0) == found


def test_a_node_without_a_driver_is_not_asked() -> None:
    assert gpu_problems() == []
