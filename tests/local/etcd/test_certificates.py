"""Certificates of a private etcd."""

from __future__ import annotations

import ssl
from pathlib import Path

from slurm_elastic.rendezvous.records.etcd.certificates import create_authority


def test_certificates_are_accepted_where_all_rules_are_kept(tmp_path: Path) -> None:
    """As by Python since 3.13, on both sides."""
    authority = create_authority(tmp_path)
    both = [
        (ssl.Purpose.CLIENT_AUTH, authority.issue("member", ["127.0.0.1"], tmp_path)),
        (ssl.Purpose.SERVER_AUTH, authority.issue("client", [], tmp_path)),
    ]
    sides = []
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    for purpose, own in both:
        context = ssl.create_default_context(purpose, cafile=authority.own.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_cert_chain(own.certificate, own.key)
        is_server = purpose is ssl.Purpose.CLIENT_AUTH
        ends = (incoming, outgoing) if is_server else (outgoing, incoming)
        host = None if is_server else "127.0.0.1"
        sides.append(context.wrap_bio(*ends, server_side=is_server, server_hostname=host))
    server, client = sides
    waiting = {"client": client, "server": server}
    for _ in range(5):
        for name, side in tuple(waiting.items()):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            del waiting[name]
    assert not waiting
