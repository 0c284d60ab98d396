"""The launcher's parts, without a server."""

import errno
import random
import re
import socket
import sys
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from launcher import Server, triton
from launcher.__main__ import main
from launcher.command import Launch
from launcher.deployment import alias_names, load_deployment, models_to_load, write_aliases
from launcher.drain import LauncherClient
from launcher.log import LogFollower
from launcher.settings import LauncherSettings, Ports, free_ports
from launcher.triton import Triton, find_triton
from orchestrator.core.deployment.config import CALL_THREADS, ENGINE_KEY, STATE_FOLDER, ServingConfig
from orchestrator.core.errors import ConfigError


def test_free_ports_differ_and_are_free():
    ports = free_ports()
    assert len({ports.http, ports.grpc, ports.metrics, ports.health}) == 4
    ports.check_free("127.0.0.1")


def test_free_ports_lie_below_those_that_the_kernel_gives_out():
    """Until Triton listens on them, and while it is started anew, nothing holds them."""
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for _ in range(20) for port in asdict(free_ports()).values()]
    assert not [port for port in ports if lowest <= port <= highest]


def test_free_ports_pass_over_those_in_use(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda *_, k: [port, port, *range(20_000, 20_100)])
        assert port not in asdict(free_ports()).values()
        monkeypatch.setattr(random, "sample", lambda *_, k: [port] * k)
        with pytest.raises(ConfigError, match="found fewer than four free ports among 200 that were tried"):
            free_ports()


def test_ports_environment_is_read_and_zero_is_any():
    ports = LauncherSettings.from_environment({"SPECSERVE_HTTP_PORT": "9000", "SPECSERVE_METRICS_PORT": "0"}).ports()
    assert (ports.http, ports.grpc, ports.health) == (9000, 8001, 8003)
    assert ports.metrics > 0


@pytest.mark.parametrize("text", ["http", "-1", "65536", "8000.0", "８０００"])
def test_ports_bad_number_is_refused(text):
    with pytest.raises(
        ConfigError,
        match=rf"http_port must be a port in 0\.\.65535, got '?{text}'? \(environment variable SPECSERVE_HTTP_PORT\)",
    ):
        LauncherSettings.from_environment({"SPECSERVE_HTTP_PORT": text})


def test_ports_twice_the_same_is_refused():
    with pytest.raises(ConfigError, match="must differ"):
        LauncherSettings.from_environment({"SPECSERVE_HTTP_PORT": "9000", "SPECSERVE_GRPC_PORT": "9000"}).ports()


def test_ports_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = Ports(free_ports().http, taken.getsockname()[1], free_ports().metrics)
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1:{ports.grpc} for grpc: .* in use \(set SPECSERVE_GRPC_PORT\)"
        ):
            ports.check_free("127.0.0.1")


@pytest.mark.parametrize("host", ["203.0.113.1", "2001:db8::1"])  # of documentation, never of this machine
def test_ports_address_of_another_machine_is_named(host):
    with pytest.raises(ConfigError, match=r"cannot listen on .* for http: .* \(set SPECSERVE_HOST\)"):
        free_ports().check_free(host)


def test_settings_are_read_under_their_own_names_only(monkeypatch, capsys):
    """Other programs set the bare names: HOST is a platform in conda, and the machine's name in tcsh."""
    bare = {"HOST": "x86_64-conda-linux-gnu", "LOG_LEVEL": "debug", "HTTP_PORT": "80", "STOP_LIMIT_S": "5"}
    assert LauncherSettings.from_environment(bare) == LauncherSettings()
    monkeypatch.setattr("launcher.__main__.Server", lambda config, **options: None)
    monkeypatch.setattr("launcher.__main__.signal.signal", lambda *_: None)
    monkeypatch.setattr("launcher.__main__._run", lambda server: 0)
    of_a_service = {"SPECSERVE_SERVICE_PORT": "8001", "SPECSERVE_PORT": "tcp://10.0.0.1:8001"}
    ours = {"SPECSERVE_STOP_LIMIT_S": "60", CALL_THREADS: "64", STATE_FOLDER: "/run", ENGINE_KEY: "key"}
    for name, text in {**bare, **of_a_service, **ours, "SPECSERVE_READY_LIMIT": "600"}.items():
        monkeypatch.setenv(name, text)
    assert main(["serving.toml"]) == 0
    assert capsys.readouterr().err == (
        "warning: HTTP_PORT is not read; set SPECSERVE_HTTP_PORT\n"
        "warning: SPECSERVE_READY_LIMIT is not read; set SPECSERVE_READY_LIMIT_S\n"
    )


@pytest.mark.parametrize(
    ("host", "there"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]"), ("fd00::2", "[fd00::2]")],
)
def test_server_is_reached_at_its_address(host, there, tmp_path):
    server = Server(tmp_path / "serving.toml", host=host, ports=Ports())
    assert server.http_url == f"http://{there}:8000" and server.grpc_url == f"{there}:8001"
    assert server.metrics_url == f"http://{there}:8002/metrics" and server.health_url == f"http://{there}:8003"
    client = LauncherClient(host, 8003)
    assert client._host == there.strip("[]") and client._where.startswith(f"{there}:8003 ")


def test_command_addresses_are_written_as_triton_reads_them(tmp_path):
    """Of a bare ::1 its gRPC server says that it is in use, and its HTTP server listens elsewhere."""
    flags = launch(tmp_path, host="::1")._flags(tmp_path)
    assert {"--http-address=ipv6:::1", "--grpc-address=[::1]", "--metrics-address=ipv6:::1"} <= {*flags}
    assert "--grpc-address=127.0.0.1" in launch(tmp_path)._flags(tmp_path)


def test_time_limits_come_from_the_environment():
    def limits(environ):
        settings = LauncherSettings.from_environment(environ)
        return settings.ready_limit_s, settings.stop_limit_s

    assert limits({"SPECSERVE_READY_LIMIT_S": ""}) == (180, 10)
    assert limits({"SPECSERVE_READY_LIMIT_S": "900", "SPECSERVE_STOP_LIMIT_S": "60"}) == (900, 60)


@pytest.mark.parametrize("text", ["0", "-1", "5 s", "1.5", "86401", "１０"])
def test_invalid_time_limit_is_refused(text):
    message = (
        rf"stop_limit_s must be a whole number of seconds in 1\.\.86400, got '?{text}'? \(.* SPECSERVE_STOP_LIMIT_S\)"
    )
    with pytest.raises(ConfigError, match=message):
        LauncherSettings.from_environment({"SPECSERVE_STOP_LIMIT_S": text})


def test_command_hands_the_time_limits_to_the_server(monkeypatch):
    made = {}
    monkeypatch.setattr("launcher.__main__.Server", lambda config, **options: made.update(options))
    monkeypatch.setattr("launcher.__main__.signal.signal", lambda *_: None)
    monkeypatch.setattr("launcher.__main__._run", lambda server: 0)
    monkeypatch.setenv("SPECSERVE_READY_LIMIT_S", "900")
    monkeypatch.setenv("SPECSERVE_STOP_LIMIT_S", "60")
    assert main(["serving.toml"]) == 0
    assert (made["ready_limit_s"], made["stop_limit_s"]) == (900, 60)
    monkeypatch.setenv("SPECSERVE_READY_LIMIT_S", "soon")
    assert main(["serving.toml"]) == 2


def make_repository(folder, *models):
    for model in models:
        (folder / model / "1").mkdir(parents=True)
        (folder / model / "config.pbtxt").touch()
    return folder


def make_checkpoint(folder):
    folder.mkdir()
    (folder / "config.json").touch()
    return str(folder)


def test_models_to_load_are_those_named_and_the_public_ones(tmp_path):
    repository = make_repository(tmp_path / "r", "target", "draft", "medusa", "speculative")
    target, draft = make_checkpoint(tmp_path / "t"), make_checkpoint(tmp_path / "d")
    assert models_to_load(ServingConfig(target=target), repository) == ["target", "speculative"]
    apart = ServingConfig(target=target, draft=draft, placement="separate")
    assert models_to_load(apart, repository) == ["target", "draft", "speculative"]


def test_loading_a_deployment_checks_what_it_names(tmp_path):
    repository, target = make_repository(tmp_path / "r", "target", "speculative"), make_checkpoint(tmp_path / "t")
    (tmp_path / "serving.toml").write_text(f'target = "{target}"')
    config, models = load_deployment(tmp_path / "serving.toml", {}, repository)
    assert config.target == target and models == ["target", "speculative"]
    with pytest.raises(ConfigError, match="does not exist"):
        load_deployment(tmp_path / "serving.toml", {"SERVING_TARGET": str(tmp_path / "none")}, repository)


def test_models_to_load_drafters_of_runs_are_in_the_target_s_process(tmp_path):
    repository = make_repository(tmp_path / "r", "target", "draft", "speculative")
    target, draft = make_checkpoint(tmp_path / "t"), make_checkpoint(tmp_path / "d")
    assert models_to_load(ServingConfig(target=target, draft=draft), repository) == ["target", "speculative"]
    with pytest.raises(ConfigError, match=r"does not exist \(key draft"):
        models_to_load(ServingConfig(target=target, draft=str(tmp_path / "none")), repository)


def test_models_to_load_drafter_without_a_triton_model_is_refused(tmp_path):
    repository = make_repository(tmp_path / "r", "target", "speculative")
    config = ServingConfig(target="owner/name", medusa="owner/heads", placement="separate")
    with pytest.raises(ConfigError, match=r"no Triton model 'medusa' .* speculative, target \(key medusa\)"):
        models_to_load(config, repository)


def test_models_to_load_missing_or_empty_checkpoint_is_refused(tmp_path):
    repository = make_repository(tmp_path / "r", "target")
    with pytest.raises(ConfigError, match=r"does not exist \(key target"):
        models_to_load(ServingConfig(target=str(tmp_path / "none")), repository)
    with pytest.raises(ConfigError, match=r"config\.json is missing \(key target"):
        models_to_load(ServingConfig(target=str(tmp_path)), repository)


def launch(tmp_path, **changes):
    given = {
        "repositories": (tmp_path,),
        "models": ("target",),
        "host": "127.0.0.1",
        "ports": Ports(),
        "key": "secret",
        "region_prefix": "p-",
        "exit_limit_s": 5,
        "log_level": "warning",
        "uses_gpu": False,
        "call_threads": 160,
    }
    return Launch(**{**given, **changes})


class OldTriton(Triton):
    def flags(self):
        return frozenset({"--model-repository", "--load-model", "--http-port"})


def test_command_leaves_out_unknown_flags_but_never_the_restrictions(tmp_path):
    old = OldTriton(tmp_path / "tritonserver", tmp_path, (), from_wheel=True)
    names = [part.split("=")[0] for part in launch(tmp_path).command(old)[1:]]
    assert names == [
        "--model-repository",
        "--load-model",
        "--http-port",
        "--http-restricted-api",
        "--grpc-restricted-protocol",
    ]


def test_command_key_is_not_in_the_repr(tmp_path):
    assert "secret" not in repr(launch(tmp_path))


def test_find_triton_nothing_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"no Triton server: neither .* nor the package nvidia-pytriton"):
        find_triton({"TRITON_ROOT": str(tmp_path)}, tmp_path)


def test_find_triton_without_a_stub_for_this_python_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(triton, "_VERSION", "3.99")
    pytest.importorskip("pytriton")
    with pytest.raises(ConfigError, match=r"no stub for Python 3\.99, only for 3\.8, .*3\.12, 3\.13"):
        find_triton({"TRITON_ROOT": str(tmp_path)}, tmp_path)


def make_container(root, version):
    for name in ("bin/tritonserver", f"backends/python/{triton.STUB}"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"\x7fELF libpython" + version.encode() + b".so.1.0")


def test_find_triton_container_comes_first(tmp_path):
    make_container(tmp_path, triton._VERSION)
    found = find_triton({"TRITON_ROOT": str(tmp_path)}, tmp_path / "work")
    assert (found.binary, found.backends, found.from_wheel) == (
        tmp_path / "bin/tritonserver",
        tmp_path / "backends",
        False,
    )


def test_find_triton_container_for_another_python_is_refused(tmp_path):
    make_container(tmp_path, "3.9")
    with pytest.raises(ConfigError, match=r"built for Python 3\.9, this is"):
        find_triton({"TRITON_ROOT": str(tmp_path)}, tmp_path / "work")


def test_a_log_that_cannot_be_read_for_a_moment_does_not_end_the_server(tmp_path, monkeypatch):
    server = Server(tmp_path / "serving.toml")
    reads = []

    def new_text(_):
        reads.append(1)
        if len(reads) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return "a line\n"

    said = []
    server._pass_on = lambda line: (said.append(line), server.request_stop())
    (tmp_path / "log").write_text("")
    monkeypatch.setattr(Server, "log_path", tmp_path / "log")
    monkeypatch.setattr(Server, "failure", lambda _: None)
    monkeypatch.setattr(LogFollower, "new_text", new_text)
    assert server.wait() is None and said == ["a line"]


def test_what_the_launcher_says_has_the_time_and_a_line_of_triton_only_its_own(tmp_path, monkeypatch, capsys):
    server = Server(tmp_path / "serving.toml")
    of_triton = "W1125 20:32:45.570302 8348 server.cc:241] a warning"

    def failure(_):
        server._say("replacing Triton")
        server.request_stop()

    (tmp_path / "log").write_text("")
    monkeypatch.setattr(Server, "log_path", tmp_path / "log")
    monkeypatch.setattr(Server, "failure", failure)
    monkeypatch.setattr(LogFollower, "new_text", lambda _: f"{of_triton}\n")
    before = datetime.now(UTC)
    assert server.wait() is None
    written = capsys.readouterr()
    passed_on, said = written.err.splitlines()
    time, _, text = said.partition(" ")
    assert (written.out, passed_on, text) == ("", of_triton, "replacing Triton")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert (
        before <= datetime.fromisoformat(time) + timedelta(milliseconds=1) <= datetime.now(UTC) + timedelta(seconds=1)
    )


def test_environment_puts_this_interpreter_first_and_keeps_the_rest(tmp_path):
    found = Triton(tmp_path, tmp_path, (tmp_path / "lib",), from_wheel=True)
    environ = found.environment({"PATH": "/bin", "HOME": "/h"})
    assert environ["PATH"] == f"{Path(sys.executable).parent}:/bin"
    assert environ["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path / "lib")
    assert environ["HOME"] == "/h"
    assert not environ["LD_LIBRARY_PATH"].endswith(":")  # an empty part would mean the working directory


def test_flags_binary_that_does_not_run_says_why(tmp_path):
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\necho 'error while loading shared libraries: libx.so' >&2\nexit 127\n")
    binary.chmod(0o755)
    with pytest.raises(ConfigError, match=r"does not run: error while loading shared libraries: libx\.so"):
        Triton(binary, tmp_path, (), from_wheel=False).flags()


def test_aliases_must_be_valid_names_that_are_not_taken():
    assert alias_names("", ["target"]) == []
    assert alias_names("ensemble, tensorrt_llm_bls", ["target"]) == ["ensemble", "tensorrt_llm_bls"]
    for wrong, said in (("a/b", "got 'a/b'"), ("target", "'target', which is taken"), ("x,x", "'x', which is taken")):
        with pytest.raises(ConfigError, match=rf"aliases must be .*{said}.* \(key aliases\)"):
            alias_names(wrong, ["target"])


def test_alias_is_the_public_model_under_another_name(tmp_path):
    repository = Path(__file__).resolve().parents[3] / "model_repository"
    write_aliases(tmp_path / "aliases", repository, ["ensemble"])
    config = (tmp_path / "aliases/ensemble/config.pbtxt").read_text()
    assert config.replace('"ensemble"', '"speculative"') == (repository / "speculative/config.pbtxt").read_text()
    assert (tmp_path / "aliases/ensemble/1/model.py").resolve() == (repository / "speculative/1/model.py").resolve()
    write_aliases(tmp_path / "none", tmp_path, [])  # a repository without the public model
    assert not (tmp_path / "none").exists()
