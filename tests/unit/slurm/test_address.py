from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm.address import (
    AddressFacts,
    AddressPreference,
    choose_address,
    data_interface,
    gather_facts,
    gloo_interface,
    resolve,
)

INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7", "ib1": None}
NO_PREFERENCE = AddressPreference()


def facts(**known: object) -> AddressFacts:
    return AddressFacts("n7", interfaces=INTERFACES, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preference", "known", "chosen"),
    [
        (AddressPreference(local_addr="n7.fabric", interface="ib9"), facts(), "n7.fabric"),
        (AddressPreference(interface="ib0"), facts(route="10.0.0.7"), "10.1.0.7"),
        (AddressPreference(interface="lo"), facts(), "127.0.0.1"),
        (AddressPreference(host_pattern="{node}-ib"), facts(resolved={"n7-ib": "10.1.0.7"}), "n7-ib"),
        (NO_PREFERENCE, facts(node_addr="10.0.0.7", resolved={"10.0.0.7": "10.0.0.7", "n7": "10.9.0.7"}), "10.0.0.7"),
        (NO_PREFERENCE, facts(node_addr="n7", resolved={"n7": "10.0.0.7"}), "n7"),
        (NO_PREFERENCE, facts(node_addr="n7-mgmt", resolved={"n7": "10.0.0.7"}), "n7"),
        (
            NO_PREFERENCE,
            facts(node_addr="127.0.0.1", resolved={"127.0.0.1": "127.0.0.1"}, route="10.0.0.7"),
            "10.0.0.7",
        ),
        (NO_PREFERENCE, facts(resolved={"n7": "127.0.1.1"}, route="10.0.0.7"), "10.0.0.7"),
        (NO_PREFERENCE, facts(resolved={"n7": "::1"}, route="10.0.0.7"), "10.0.0.7"),
        (NO_PREFERENCE, facts(resolved={"n7": "fe80::1%eth0"}), "n7"),
        (NO_PREFERENCE, facts(route="10.0.0.7"), "10.0.0.7"),
        (NO_PREFERENCE, AddressFacts("n7", interfaces={"lo": "127.0.0.1", "eth0": None}), "127.0.0.1"),
    ],
)
def test_choice(preference: AddressPreference, known: AddressFacts, chosen: str) -> None:
    assert choose_address(preference, known) == chosen


@pytest.mark.parametrize(
    ("preference", "known", "said"),
    [
        (
            AddressPreference(interface="ib9"),
            facts(),
            ("no interface ib9 with an IPv4 address on n7", "lo 127.0.0.1", "ib1 without IPv4 address"),
        ),
        (AddressPreference(interface="ib1"), facts(), ("no interface ib1 with an IPv4 address on n7", "ib0 10.1.0.7")),
        (AddressPreference(host_pattern="node-ib"), facts(), ("lacks {node}", "'{node}-ib'")),
        (AddressPreference(host_pattern="{node}-ib"), facts(), ("n7-ib", "does not resolve on n7", "eth0 10.0.0.7")),
        (
            AddressPreference(host_pattern="{node}-ib"),
            facts(resolved={"n7-ib": "127.0.1.1"}),
            ("resolves to the loopback address 127.0.1.1 on n7", "--interface"),
        ),
        (NO_PREFERENCE, facts(route="127.0.0.1"), ("no address by which other nodes reach n7", "--local-addr")),
        (
            NO_PREFERENCE,
            facts(resolved={"n7": "127.0.1.1"}),
            ("--interface (eth0 10.0.0.7, ib0 10.1.0.7)", "--local-addr"),
        ),
    ],
)
def test_what_cannot_be_says_what_there_is(
    preference: AddressPreference, known: AddressFacts, said: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        choose_address(preference, known)
    assert all(part in str(caught.value) for part in said), str(caught.value)


@pytest.mark.parametrize(
    ("preference", "known", "interface"),
    [
        (NO_PREFERENCE, facts(route="10.0.0.7"), ""),
        (AddressPreference(local_addr="n7.fabric", interface="ib0"), AddressFacts("n7"), ""),
        (AddressPreference(interface="ib0"), facts(), "ib0"),
        (AddressPreference(host_pattern="{node}-ib"), facts(resolved={"n7-ib": "10.1.0.7"}), "ib0"),
        (AddressPreference(host_pattern="{node}-ib"), facts(resolved={"n7-ib": "10.2.0.7"}), ""),
    ],
)
def test_the_interface_of_the_data_network(preference: AddressPreference, known: AddressFacts, interface: str) -> None:
    assert data_interface(preference, known) == interface


ADDRESS = {"node_addr": "10.0.0.7", "own_name": "n7.example.org", "own_addresses": ("10.0.0.7", "10.1.0.7", "10.1.0.8")}


@pytest.mark.parametrize(
    ("resolves_to", "interface"),
    [
        (None, "eth0"),
        ("127.0.1.1", "eth0"),
        # The address of another host, or of this one before an address translation.
        ("192.168.0.7", "eth0"),
        ("10.0.0.7", ""),
        # Of an interface that has several.
        ("10.1.0.8", ""),
    ],
)
def test_gloo_needs_an_interface_where_the_hosts_name_leads_nowhere(resolves_to: str | None, interface: str) -> None:
    own = {} if resolves_to is None else {"n7.example.org": resolves_to}
    known = facts(resolved={"10.0.0.7": "10.0.0.7", **own}, **ADDRESS)
    assert gloo_interface(NO_PREFERENCE, known) == interface
    assert gloo_interface(NO_PREFERENCE, replace(known, own_name="")) == ""


def test_gloo_gets_no_loopback_interface_and_none_that_is_unknown() -> None:
    alone = AddressFacts("n7", interfaces={"lo": "127.0.0.1"}, own_name="n7")
    assert gloo_interface(NO_PREFERENCE, alone) == ""
    assert gloo_interface(NO_PREFERENCE, replace(facts(route="10.9.0.7"), own_name="n7.example.org")) == ""


def test_gathers_this_machines_interfaces() -> None:
    found = gather_facts(AddressPreference(interface="lo"), "n7")
    assert found.interfaces["lo"] == "127.0.0.1"
    assert choose_address(AddressPreference(interface="lo"), found) == "127.0.0.1"


def test_a_loopback_peer_gives_no_route() -> None:
    # A machine without any network has no route at all.
    route = gather_facts(NO_PREFERENCE, "no-such-node.invalid", toward="127.0.0.1").route
    assert route is None or not route.startswith("127.")


def test_looks_up_the_patterns_name_alone() -> None:
    found = gather_facts(AddressPreference(host_pattern="localhos{node}"), "t")
    assert set(found.resolved) == {"localhost"}
    assert found.route is None


def test_resolve() -> None:
    assert resolve("127.0.0.1") == "127.0.0.1"
    assert resolve("no-such-node.invalid") is None
    assert resolve("a" * 300) is None
