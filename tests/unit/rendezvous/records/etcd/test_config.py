from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.config import Endpoint, EtcdConfig, load_config


def config(endpoint: str = "", environment: dict[str, str] | None = None, **options: object) -> EtcdConfig:
    return load_config(endpoint, options, environment or {})


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    for name in ("ca.pem", "own.pem", "key.pem"):
        (tmp_path / name).touch()
    path = tmp_path / "etcd.json"
    path.touch(mode=0o600)
    path.write_text(
        json.dumps(
            {
                "endpoint": "etcds://of-file:1",
                "ca_cert": "ca.pem",
                "ssl_cert": "own.pem",
                "ssl_cert_key": "key.pem",
                "user": "user-of-file",
                "password": "password-of-file",
                "key_prefix": "/of-file/",
            }
        )
    )
    return path


@pytest.mark.parametrize(
    ("text", "endpoints", "tls"),
    [
        ("etcd://a:1,b:2", [("a", 1), ("b", 2)], False),
        ("etcds://a", [("a", 2379)], True),
        ("a, b:3", [("a", 2379), ("b", 3)], False),
        ("a:1,a:1", [("a", 1)], False),
        ("etcd://[::1]:7,[fe80::2]", [("::1", 7), ("fe80::2", 2379)], False),
        (" etcd://10.0.0.1:2379/ ", [("10.0.0.1", 2379)], False),
    ],
)
def test_endpoints(text: str, endpoints: list[tuple[str, int]], tls: bool) -> None:
    parsed = config(text)
    assert [(one.host, one.port) for one in parsed.endpoints] == endpoints
    assert parsed.tls is tls
    assert config(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no etcd endpoint"),
        ("etcd://", "no etcd endpoint"),
        ("http://a:1", "etcds://"),
        ("a:0", "host:port"),
        ("a:70000", "host:port"),
        ("a:port", "host:port"),
        (":2379", "host:port"),
        ("::1", "IPv6"),
        ("etcd://a:1/path", "host:port"),
        ("etcd://user:secret@a:1", "credentials file"),
    ],
)
def test_bad_endpoints(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        config(text)
    assert "secret" not in str(caught.value)


def test_names_of_torch(credentials: Path) -> None:
    paths = [str(credentials.parent / name) for name in ("ca.pem", "own.pem", "key.pem")]
    ours = config("etcds://a", ca_cert=paths[0], ssl_cert=paths[1], ssl_cert_key=paths[2], key_prefix="/my/runs/")
    assert config("etcds://a", cacert=paths[0], cert=paths[1], key=paths[2], etcd_prefix="my/runs") == ours
    assert config("etcds://a", cacert=paths[0], cert=paths[1], key=paths[2], etcd_prefix="/my/runs/") == ours
    with pytest.raises(UsageError, match="cert and ssl_cert are two names"):
        config("etcds://a", cert=paths[1], ssl_cert=paths[1], key=paths[2])


def test_option_before_environment_before_file(credentials: Path) -> None:
    of_file = config(credentials=str(credentials))
    assert of_file == EtcdConfig(
        (Endpoint("of-file", 1),),
        tls=True,
        ca_cert=credentials.parent / "ca.pem",
        ssl_cert=credentials.parent / "own.pem",
        ssl_cert_key=credentials.parent / "key.pem",
        user="user-of-file",
        password="password-of-file",
        prefix="/of-file/",
    )
    environment = {
        "SLURM_ELASTIC_ETCD_CREDENTIALS": str(credentials),
        "SLURM_ELASTIC_ETCD_ENDPOINT": "etcds://of-environment:2",
        "SLURM_ELASTIC_ETCD_USER": "user-of-environment",
        "SLURM_ELASTIC_ETCD_PASSWORD": "password-of-environment",
    }
    of_environment = config(environment=environment)
    assert of_environment.endpoints == (Endpoint("of-environment", 2),)
    assert (of_environment.user, of_environment.password) == ("user-of-environment", "password-of-environment")
    assert of_environment.prefix == "/of-file/"
    of_option = config("etcds://of-option:3", environment, user="user-of-option", key_prefix="/of-option/")
    assert of_option.endpoints == (Endpoint("of-option", 3),)
    assert of_option.user == "user-of-option"
    assert of_option.prefix == "/of-option/"


def test_other_options_are_left_alone() -> None:
    assert config("a", join_timeout=5, timeout=900) == config("a")


def test_tls_by_certificates_alone(credentials: Path) -> None:
    ca_cert = str(credentials.parent / "ca.pem")
    assert config("a", ca_cert=ca_cert).tls
    with pytest.raises(UsageError, match="etcds://"):
        config("etcd://a", ca_cert=ca_cert)


def test_password_is_in_no_text() -> None:
    made = config("etcds://a", {"SLURM_ELASTIC_ETCD_PASSWORD": "secret"}, user="me")
    assert made.password == "secret"
    assert "secret" not in repr(made) + str(made)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.password = ""  # type: ignore[misc]


def test_a_password_leaves_this_machine_encrypted_unless_asked_otherwise() -> None:
    password = {"SLURM_ELASTIC_ETCD_PASSWORD": "secret"}
    with pytest.raises(UsageError, match=r"password would go to 10\.0\.0\.1 unencrypted.*write etcds://"):
        config("etcd://localhost,10.0.0.1", password, user="me")
    assert config("etcd://localhost,127.0.0.2", password, user="me").password == "secret"
    asked = {**password, "SLURM_ELASTIC_ETCD_PLAIN_PASSWORD": "1"}
    assert config("etcd://10.0.0.1", asked, user="me").password == "secret"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"password": "secret"}, "every user of the node"),
        ({"user": "me"}, "user and password go together"),
        ({"ssl_cert": "/dev/null"}, "go together"),
        ({"ca_cert": "/no/such/file"}, "/no/such/file"),
        ({"key_prefix": "without/slash"}, "slash"),
        ({"credentials": "/no/such/file"}, "/no/such/file"),
        ({"credentials": "/dev/null"}, "no plain file"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        config("a", **options)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_credentials_that_others_can_read(credentials: Path, mode: int) -> None:
    credentials.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        config(credentials=credentials)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "object of strings"),
        ("[]", "object of strings"),
        ('{"user": 7}', "object of strings"),
        ('{"pasword": "x"}', "unknown name 'pasword'"),
    ],
)
def test_credentials_that_are_none(credentials: Path, content: str, words: str) -> None:
    credentials.write_text(content)
    with pytest.raises(UsageError, match=words):
        config(credentials=credentials)


def test_runs_have_prefixes_of_their_own() -> None:
    made = config("a")
    assert made.run_prefix("12_3") == "/slurm-elastic/12_3/"
    assert made.run_prefix("a/b") == "/slurm-elastic/a%2Fb/"
