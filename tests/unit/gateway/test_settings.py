"""Settings: flags before variables before defaults; a wrong one is named with its value and its place."""

import argparse
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.__main__ import main
from gateway.keys import ApiKeys
from gateway.replicas import Replicas
from gateway.settings import Settings, SettingsError, parse_flags, read_settings
from tests.support.clients import until
from tests.unit.gateway.test_tokenizer import write

pytestmark = pytest.mark.unit


def test_flags_go_before_variables_before_defaults() -> None:
    found = read_settings({"port": "1"}, {"GATEWAY_PORT": "2", "GATEWAY_MAX_SEQUENCES": "3", "PORT": "4"})

    assert (found.port, found.max_sequences, found.host) == (1, 3, "127.0.0.1")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GATEWAY_PORT": "99999"}, ["port", "'99999'", "--port or GATEWAY_PORT"]),
        ({"GATEWAY_PORTT": "1"}, ["GATEWAY_PORTT", "did you mean 'GATEWAY_PORT'"]),
        ({"GATEWAY_SILENCE_LIMIT_S": "nan"}, ["silence_limit_s", "GATEWAY_SILENCE_LIMIT_S"]),
        ({"GATEWAY_LOG_LEVEL": "loud"}, ["log_level", "loud"]),
        ({"GATEWAY_ALLOWED_ORIGINS": "https://a.example, b.example"}, ["allowed_origins", "b.example"]),
        ({"GATEWAY_ALLOWED_ORIGINS": "https://a.example/"}, ["allowed_origins", "https://a.example/"]),
    ],
)
def test_a_wrong_setting_is_named(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        read_settings({}, variables)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "replicas", ["host", "host:port", ":1", "a:1,b", "dns://a:1,b:2", "http://a:1", "a:65536", "a:0", "a:²"]
)
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
        (["--port", "x"], "--port or GATEWAY_PORT"),
        (["--tokenizer", "models/target", "--salt-by-key"], "salt_by_key needs API keys"),
    ],
)
def test_the_command_says_what_is_wrong_and_ends_with_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert words in capsys.readouterr().err


def test_a_flag_that_is_on_or_off_needs_no_value() -> None:
    for flags, wanted in ((["--salt-by-key"], True), (["--salt-by-key", "false"], False), ([], False)):
        _, found = parse_flags(argparse.ArgumentParser(), flags)
        assert read_settings(found, {}).salt_by_key is wanted
    assert read_settings({}, {"GATEWAY_SALT_BY_KEY": "true"}).salt_by_key


def test_the_help_says_that_a_key_in_a_flag_can_be_seen() -> None:
    parser = argparse.ArgumentParser()
    parse_flags(parser, [])
    help_of_keys = re.sub(r"\s+", " ", parser.format_help().partition("--api-keys …")[2])
    assert "(ps): better use --api-keys-file or GATEWAY_API_KEYS" in help_of_keys


def test_a_file_of_keys_may_hold_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"first \n\n\xff\xfe\n")
    assert ApiKeys(Settings(api_keys="a, b", api_keys_file=str(tmp_path / "keys"))).accepted == {
        b"a",
        b"b",
        b"first",
        b"\xff\xfe",
    }


@pytest.mark.parametrize("keys", ["", " ", ",", "\n"])
@pytest.mark.parametrize("name", ["api_keys", "api_keys_file"])
def test_an_api_keys_setting_without_keys_does_not_open_the_gateway(name: str, keys: str, tmp_path: Path) -> None:
    """As a Secret or a variable of the shell that is empty by mistake would."""
    text = keys
    if name == "api_keys_file" and keys:
        (tmp_path / "keys").write_text(keys.replace(",", "\n"))
        text = str(tmp_path / "keys")
    where = f"--{name.replace('_', '-')} or GATEWAY_{name.upper()}"
    for found in (read_settings({}, {f"GATEWAY_{name.upper()}": text}), read_settings({name: text}, {})):
        with pytest.raises(SettingsError, match=re.escape(where)) as error:
            ApiKeys(found)
        assert f"{name} contains no API key, got {text!r}: at least one is needed" in str(error.value)


def test_only_without_settings_for_keys_the_gateway_is_open() -> None:
    assert ApiKeys(read_settings({}, {"GATEWAY_PORT": "", "GATEWAY_API_KEYS": "a,"})).accepted == {b"a"}
    assert ApiKeys(read_settings({}, {})).accepted == frozenset()


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_taken_port_is_an_error_of_one_line(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = str(listener.getsockname()[1])
        assert main(["--tokenizer", str(write(tmp_path)), "--port", "0", flag, taken]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot listen on 127.0.0.1:{taken}: ") and flag in line


def test_the_command_serves_until_it_is_asked_to_stop(tmp_path: Path) -> None:
    """With its metrics on a port of their own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        metrics = listener.getsockname()[1]
    command = [sys.executable, "-m", "gateway", "--tokenizer", str(write(tmp_path)), "--port", "0"]
    with subprocess.Popen([*command, "--metrics-port", str(metrics)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().split()[1].removesuffix("/v1,")
        until(lambda: httpx.get(f"{url}/health").status_code == 200, "the gateway", 60)
        assert "spec_gateway_requests_running" in httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
        process.terminate()
        assert process.wait(60) == 0
