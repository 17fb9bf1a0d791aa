from __future__ import annotations

import pytest

from slurm_elastic.agent.workers.torchrun_options import ignored_options
from slurm_elastic.cli.commands.agent import agent_parser
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.membership.config import OnTie
from slurm_elastic.rendezvous.options import RendezvousOptions


def test_defaults() -> None:
    assert RendezvousOptions.from_config({}) == RendezvousOptions(leader_limit=4.25, min_round_time=2.0)


def test_torch_launch_configuration_adds_a_timeout_that_means_nothing() -> None:
    assert RendezvousOptions.from_config({"timeout": 900}) == RendezvousOptions()


def test_keys_of_torchs_own_rendezvous_mean_nothing() -> None:
    # torch's documentation, elastic/rendezvous.
    config = "is_host=1,store_type=file,close_timeout=60,heartbeat_timeout=5,rank=0,last_call_timeout=0"
    found = RendezvousOptions.from_config(dict(pair.split("=") for pair in config.split(",")))
    assert found == RendezvousOptions(last_call_timeout=0.0)
    given = agent_parser().parse_args([f"--rdzv-conf={config}", "--node-rank=1", "train.py"])
    assert list(ignored_options(given))[1:] == [
        "--rdzv-conf: ignored, as they are for torch's own rendezvous: close_timeout, heartbeat_timeout, is_host, "
        "rank, store_type"
    ]


def test_values_come_as_text_or_numbers() -> None:
    config = {"join_timeout": "60", "last_call_timeout": 1.5, "heartbeat_limit": "0.6", "leader_limit": 7}
    assert RendezvousOptions.from_config(config) == RendezvousOptions(
        join_timeout=60.0, last_call_timeout=1.5, heartbeat_limit=0.6, leader_limit=7.0
    )


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"keep_alive_interval": "2"}, 6.0),
        ({"keep_alive_max_attempt": "5"}, 5.0),
        ({"keep_alive_interval": "2", "keep_alive_max_attempt": "5"}, 10.0),
        ({"keep_alive_interval": "2", "heartbeat_limit": "1"}, 1.0),
    ],
)
def test_torch_names_set_the_heartbeat_limit(config: dict[str, object], limit: float) -> None:
    assert RendezvousOptions.from_config(config).heartbeat_limit == limit


def test_the_leader_is_lost_to_members_after_it_has_noticed_that_it_lost_them() -> None:
    assert RendezvousOptions.from_config({"heartbeat_limit": "12"}).leader_limit == 14.75
    with pytest.raises(UsageError, match=r"leader_limit=14 is too short: .* give at least that, or a shorter"):
        RendezvousOptions.from_config({"heartbeat_limit": "12", "leader_limit": "14"})


@pytest.mark.parametrize("key", ["closing_timeout", "join_timout"])
def test_unknown_keys_are_errors(key: str) -> None:
    with pytest.raises(UsageError, match=f"--rdzv-conf: unknown key '{key}'; known are join_timeout, last_call"):
        RendezvousOptions.from_config({"join_timeout": "60", key: "1"})


@pytest.mark.parametrize(
    ("key", "ours"),
    [("read_timeout", "etcd_limit"), ("protocol", "etcds://"), ("cas_backoff_max_seconds", "leave it out")],
)
def test_what_torch_takes_and_this_rendezvous_calls_otherwise_is_named(key: str, ours: str) -> None:
    with pytest.raises(UsageError, match=f"--rdzv-conf: {key} is for torch's own rendezvous; .*{ours}"):
        RendezvousOptions.from_config({key: "1"})


def test_a_round_need_not_last_for_any_time() -> None:
    assert RendezvousOptions.from_config({"min_round_time": "0", "leave_margin": 0}).min_round_time == 0.0


@pytest.mark.parametrize("word", ["leader", "none"])
def test_what_half_of_a_round_is_worth(word: str) -> None:
    assert RendezvousOptions.from_config({"on_tie": word}).on_tie is OnTie(word)
    with pytest.raises(UsageError, match="--rdzv-conf: on_tie=both is neither leader nor none"):
        RendezvousOptions.from_config({"on_tie": "both"})


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", None, True])
@pytest.mark.parametrize("key", ["join_timeout", "keep_alive_interval"])
def test_values_are_positive_numbers(key: str, value: object) -> None:
    with pytest.raises(UsageError) as error:
        RendezvousOptions.from_config({key: value})
    assert str(error.value) == f"--rdzv-conf: {key}={value} is no positive number"


@pytest.mark.parametrize(
    ("config", "bounds", "expected"),
    [
        ({}, (1, 7), (1, 7)),
        ({"node_unit": "2"}, (1, 7), (2, 6)),
        ({"node_unit": 3, "valid_nodes": None}, (3, 3), (3, 3)),
        ({"valid_nodes": "2:4:8"}, (1, 7), (2, 4)),
        ({"valid_nodes": "8, 4,2", "node_unit": None}, (3, 100), (4, 8)),
    ],
)
def test_the_bounds_of_a_round_are_valid_numbers(
    config: dict[str, object], bounds: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert RendezvousOptions.from_config(config).node_range(*bounds) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"node_unit": "0"}, "--node-unit '0' is no number of nodes; give one from 1 on, as in --node-unit 2"),
        ({"node_unit": "two"}, "--node-unit 'two' is no number of nodes; give one from 1 on, as in --node-unit 2"),
        (
            {"valid_nodes": "2,,4"},
            "--valid-nodes '2,,4' is no list of numbers of nodes; write it as in --valid-nodes 2,4,8",
        ),
        (
            {"node_unit": "2", "valid_nodes": "2,4"},
            "--node-unit 2 and --valid-nodes 2,4 both say which rounds are valid; give one",
        ),
    ],
)
def test_numbers_of_nodes_that_cannot_be(config: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        RendezvousOptions.from_config(config)
    assert str(caught.value) == message
