"""The digest of what agents send each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.snapshot.transfer import fastest_digest


@pytest.mark.parametrize(
    ("cpu", "digest"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 sha_ni\nbugs\t\t: spectre\n", "sha256"),
        ("processor\t: 0\nFeatures\t: fp aes sha1 sha2 crc32\n", "sha256"),
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2\n", "blake2b"),
        ("", "blake2b"),
    ],
)
def test_the_digest_for_which_the_processor_has_instructions_is_taken(tmp_path: Path, cpu: str, digest: str) -> None:
    (tmp_path / "cpuinfo").write_text(cpu)
    assert fastest_digest(tmp_path / "cpuinfo") == digest


def test_a_machine_that_does_not_say_gets_the_digest_that_is_fast_without_them(tmp_path: Path) -> None:
    assert fastest_digest(tmp_path / "none") == "blake2b"
