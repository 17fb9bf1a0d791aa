from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from slurm_elastic.agent.health.server import HealthSettings, health_settings, listen
from slurm_elastic.errors import UsageError

TOKEN = "0123456789abcdef"


def test_what_is_not_said_is_the_loopback_and_any_port() -> None:
    settings = health_settings(None, None, None, {})
    assert settings == HealthSettings("127.0.0.1", 0, None)
    assert not settings.protected


def test_torchs_variable_says_the_port_unless_the_option_does() -> None:
    environ = {"TORCHELASTIC_HEALTH_CHECK_PORT": "9400"}
    assert health_settings(None, None, None, environ).port == 9400
    assert health_settings(None, "9500", None, environ).port == 9500


@pytest.mark.parametrize(
    ("bind", "protected"), [("127.0.0.2", False), ("::1", False), ("0.0.0.0", True), ("::", True), ("10.0.0.1", True)]
)
def test_whoever_is_reached_from_elsewhere_is_protected(bind: str, protected: bool) -> None:
    assert health_settings(bind, None, None, {}).protected is protected


@pytest.mark.parametrize("port", ["x", "-1", "65536", "9400.0", "", "٣"])
def test_what_is_no_port_is_named(port: str) -> None:
    with pytest.raises(UsageError, match=r"^--health-port .* is no port; give"):
        health_settings(None, port, None, {})
    with pytest.raises(UsageError, match=r"^TORCHELASTIC_HEALTH_CHECK_PORT .* is no port; give"):
        health_settings(None, None, None, {"TORCHELASTIC_HEALTH_CHECK_PORT": port})


def test_what_is_no_address_is_named() -> None:
    with pytest.raises(UsageError, match=r"^--health-bind 'n1' is no IP address; give 0\.0\.0\.0"):
        health_settings("n1", None, None, {})


def test_the_token_comes_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    environ = {"SLURM_ELASTIC_HEALTH_TOKEN": "fedcba9876543210"}
    settings = health_settings(None, None, str(path), environ)
    assert settings.token == TOKEN
    assert TOKEN not in repr(settings)
    assert health_settings(None, None, None, environ).token == "fedcba9876543210"
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"is open to others \(mode 0640\); chmod 600 it$"):
        health_settings(None, None, str(path), {})
    with pytest.raises(UsageError, match=r"No such file or directory; give a file that you can read$"):
        health_settings(None, None, str(tmp_path / "absent"), {})


@pytest.mark.parametrize("content", ["", "short", "two\nlines of something long", "x" * 600, "ümlaut-0123456789"])
def test_what_is_no_token_is_named_and_not_shown(content: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="has no token: give one line of 16") as refused:
        health_settings(None, None, str(path), {})
    assert not content or content not in str(refused.value)
    with pytest.raises(UsageError, match=r"^SLURM_ELASTIC_HEALTH_TOKEN has no token"):
        health_settings(None, None, None, {"SLURM_ELASTIC_HEALTH_TOKEN": content})


def test_a_port_that_is_taken_leads_to_a_free_one(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with listen(HealthSettings(port=port)) as listener:
            assert listener.getsockname()[1] not in (0, port)
    assert caplog.messages == [f"health port {port} is in use on this node; the agent takes a free one"]


@pytest.mark.parametrize("bind", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_node_is_named(bind: str) -> None:
    with pytest.raises(UsageError, match=rf"^--health-bind {bind}: no address of this node .*; give 0\.0\.0\.0"):
        listen(HealthSettings(bind))


@pytest.mark.skipif(
    int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) < 2, reason="no port is privileged here"
)
def test_a_port_of_root_is_named() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            listen(HealthSettings(port=1))
        except UsageError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read().startswith("--health-port 1: only root may open ports below ")
    os.waitpid(child, 0)
