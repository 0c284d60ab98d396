"""Settings: flags before variables before defaults; a wrong one is named with its value and its place."""

from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.app import _keys
from gateway.local import _ports, target_of
from gateway.replicas import Replicas
from gateway.settings import Settings, SettingsError, read_settings

pytestmark = pytest.mark.unit


def test_flags_go_before_variables_before_defaults() -> None:
    found = read_settings({"port": "1"}, {"GATEWAY_PORT": "2", "GATEWAY_MAX_SEQUENCES": "3", "PORT": "4"})

    assert (found.port, found.max_sequences, found.host) == (1, 3, "127.0.0.1")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GATEWAY_PORT": "99999"}, ["port", "'99999'", "--port or GATEWAY_PORT"]),
        ({"GATEWAY_PORTT": "1"}, ["GATEWAY_PORTT", "did you mean 'port'"]),
        ({"GATEWAY_SILENCE_LIMIT_S": "nan"}, ["silence_limit_s", "GATEWAY_SILENCE_LIMIT_S"]),
        ({"GATEWAY_LOG_LEVEL": "loud"}, ["log_level", "loud"]),
    ],
)
def test_a_wrong_setting_is_named(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        read_settings({}, variables)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("replicas", ["host", "host:port", ":1", "a:1,b", "dns://a:1,b:2"])
def test_addresses_are_checked(replicas: str) -> None:
    with pytest.raises(SettingsError, match="GATEWAY_REPLICAS"):
        Replicas(Settings(replicas=replicas))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "tokenizer is missing"),
        (["--tokenizer", "tests"], "no tokenizer.json"),
        (["--tokenizer", "models/target", "--api-keys-file", "/nowhere"], "/nowhere"),
        (["--tokenizer", "models/target", "--chat-template", "/nowhere"], "/nowhere"),
        (["--serve", "/nowhere.toml"], "/nowhere.toml"),
        (["--port", "x"], "--port or GATEWAY_PORT"),
    ],
)
def test_the_command_says_what_is_wrong_and_ends_with_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert words in capsys.readouterr().err


def test_a_file_of_keys_may_hold_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"first \n\n\xff\xfe\n")
    assert _keys(Settings(api_keys="a, b", api_keys_file=str(tmp_path / "keys"))) == {b"a", b"b", b"first", b"\xff\xfe"}


def test_a_restarted_server_gets_the_ports_of_the_first() -> None:
    line = "ready in 12.3 s: http://127.0.0.1:18700, gRPC 127.0.0.1:18701, metrics http://127.0.0.1:18702/metrics, "
    line += "health http://127.0.0.1:18703; models target"

    assert _ports(line) == {"HTTP_PORT": "18700", "GRPC_PORT": "18701", "METRICS_PORT": "18702", "HEALTH_PORT": "18703"}


def test_the_tokenizer_of_a_deployment_is_its_targets(tmp_path, monkeypatch) -> None:
    (tmp_path / "serving.toml").write_text('target = "here"\n')
    assert target_of(str(tmp_path / "serving.toml")) == "here"  # a hub id
    (tmp_path / "here").mkdir()
    assert target_of(str(tmp_path / "serving.toml")) == str(tmp_path / "here")
    monkeypatch.setenv("SERVING_TARGET", "owner/name")
    assert target_of(str(tmp_path / "serving.toml")) == "owner/name"


def test_a_target_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home/target").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "serving.toml").write_text('target = "~/target"\n')
    assert target_of(str(tmp_path / "serving.toml")) == str(tmp_path / "home/target")
    monkeypatch.setenv("SERVING_TARGET", "~no-such-user/target")
    with pytest.raises(SettingsError, match=r"~no-such-user/target.*SERVING_TARGET"):
        target_of(str(tmp_path / "serving.toml"))
