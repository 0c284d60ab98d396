"""The launcher over the real tritonserver: what starts, what is refused, and what is left afterwards."""

import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from launcher import StartError, process
from orchestrator.core.errors import ConfigError
from tests.support.clients import fetch, until
from tests.support.throwaway import find_server, infer, make_deployment, region_of, server_of, url_in

pytestmark = pytest.mark.server


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    return make_deployment(tmp_path, monkeypatch)


def test_server_serves_and_leaves_nothing(deployment):
    with deployment.server() as server:
        assert infer(server.http_url, 1) == 1 + 5
        pids = server.pids()
        assert sorted(pids.values()) == ["target", "tritonserver"]
        assert infer(server.http_url, 0) in pids
        region = region_of(server.http_url)
        assert list(server.shared_memory()) == [region.name]
        assert server.log_path.exists()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert deployment.leaves_nothing(region)


def test_server_environment_reaches_the_models(deployment):
    with deployment.server(env={"SERVING_MAX_NODES": "7"}) as server:
        assert infer(server.http_url, 1) == 1 + 7


@pytest.mark.parametrize("host", ["::1", "::"])
def test_server_listens_on_ipv6(deployment, host):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with deployment.server(host=host) as server:
        assert server.http_url.startswith("http://[::1]:") and infer(server.http_url, 1) == 6
        assert fetch(server.health_url, "/ready").status == 200
        assert "nv_inference" in fetch(server.metrics_url, "/metrics").body
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            assert client.is_model_ready("target")


def test_server_loads_what_is_named_and_no_more(deployment):
    deployment.add("draft", loading="raise ValueError('must not be loaded')")
    deployment.add("speculative")
    with deployment.server() as server:
        assert sorted(server.pids().values()) == ["speculative", "target", "tritonserver"]
        assert fetch(server.http_url, "/v2/models/draft/ready").status == 400


def test_server_two_at_once_keep_apart(deployment):
    with deployment.server() as first, deployment.server() as second:
        assert not first.shared_memory().keys() & second.shared_memory().keys()
        first.stop()
        assert infer(second.http_url, 1) == 6


def test_server_admin_interfaces_are_closed_the_others_open(deployment):
    with deployment.server() as server:
        for path in ("/v2/repository/models/target/unload", "/v2/repository/index"):
            assert fetch(server.http_url, path, "POST").status == 403
        assert fetch(server.http_url, "/v2/systemsharedmemory/status").status == 403
        assert fetch(server.http_url, "/v2/logging").status == 403
        for path in ("/v2", "/v2/models/target", "/v2/models/target/config", "/v2/models/target/stats"):
            assert fetch(server.http_url, path).status == 200
        client = grpcclient.InferenceServerClient(server.grpc_url)
        assert client.is_model_ready("target")
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model("target")
        client.close()


def test_command_prints_one_line_and_stops_cleanly_on_each_signal(deployment):
    for number in (signal.SIGINT, signal.SIGTERM):
        started = deployment.command()
        line = started.stdout.readline()
        assert re.match(
            r"ready in [\d.]+ s: http://127\.0\.0\.1:\d+, gRPC 127\.0\.0\.1:\d+, metrics http\S+, health http://127\.0\.0\.1:\d+; models target( \((torch|native)\))?$",
            line,
        )
        group, region = server_of(started.pid), region_of(url_in(line))
        started.send_signal(number)
        rest, errors = started.communicate(timeout=30)
        assert (started.returncode, rest, errors) == (0, "", "")
        assert process.group_members(group) == []
        assert deployment.leaves_nothing(region)


def test_command_stopped_while_loading_ends_at_once(deployment):
    deployment.add("target", loading="time.sleep(60)")
    started = deployment.command()
    group = until(lambda: started.poll() is None and find_server(started.pid), "the server", 30)
    time.sleep(1)
    began = time.monotonic()
    started.terminate()
    _, errors = started.communicate(timeout=30)
    assert (started.returncode, errors) == (0, "")
    assert time.monotonic() - began < 20
    assert process.group_members(group) == []


def test_command_port_in_use_is_one_line_and_exit_2(deployment):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, errors = deployment.fails(SPECSERVE_GRPC_PORT=taken.getsockname()[1])
    assert code == 2 and len(errors) == 1
    assert "Address already in use (set SPECSERVE_GRPC_PORT)" in errors[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('target = "checkpoint"\nmax_node = 1', "unknown key 'max_node'; did you mean 'max_nodes'?"),
        ('target = "nowhere"', "nowhere: it does not exist (key target"),
        ('target = "checkpoint"\nplacement = "separate"\ndraft = "checkpoint"', "no Triton model 'draft' in"),
        ('target = "checkpoint"\nmax_nodes = 0', "max_nodes must be an integer in 1..128, got 0"),
    ],
)
def test_command_wrong_deployment_is_one_line_and_exit_2(deployment, text, words):
    deployment.config.write_text(text)
    code, errors = deployment.fails()
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith("error: ") and words in errors[0]


@pytest.mark.parametrize(
    ("loading", "words"),
    [
        (
            "raise pb_utils.TritonModelException('pool full, 3 blocks needed')",
            "model target: pool full, 3 blocks needed",
        ),
        ("import nonsense", "model target: ModuleNotFoundError: No module named 'nonsense'"),
        ("os._exit(1)", "model target: Stub process 'target_0_0' is not healthy."),
    ],
)
def test_command_model_that_does_not_load_says_why_and_exits_2(deployment, loading, words):
    deployment.add("target", loading)
    code, (where, error) = deployment.fails()
    assert code == 2
    assert error == f"error: the server did not start: {words}"
    kept = Path(where.partition("Z the server's log: ")[2])
    assert "failed to load" in kept.read_text()
    kept.unlink()


def test_server_that_is_not_ready_in_time_is_reported_and_ended(deployment):
    deployment.add("target", loading="time.sleep(60)")
    said = []
    server = deployment.server(ready_limit_s=2, stop_limit_s=1, say=said.append)
    with pytest.raises(StartError, match=r"not ready after 2 s \(SPECSERVE_READY_LIMIT_S\): the server, target"):
        server.start()
    assert server.pids() == {}
    assert said == [] or Path(said[0].removeprefix("the server's log: ")).unlink() is None


def aborts(flag: Path, times: int) -> str:
    """Return the code of a model that aborts its server at the first `times` starts."""
    return (
        f"import pathlib, signal; flag = pathlib.Path({str(flag)!r}); flag.write_text(flag.read_text() + 'x'); "
        f"len(flag.read_text()) > {times} or (os.kill(os.getppid(), signal.SIGABRT), time.sleep(60))"
    )


def test_server_that_aborts_while_it_loads_is_started_once_more(deployment, tmp_path):
    flag, said = tmp_path / "starts", []
    flag.write_text("")
    deployment.add("target", loading=aborts(flag, 1))
    with deployment.server(say=said.append) as server:
        assert infer(server.http_url, 1) == 6
        assert len(server.shared_memory()) == 1
    assert len(said) == 1 and said[0].endswith("; starting it once more")


def test_server_that_aborts_twice_is_not_started_again(deployment, tmp_path):
    flag, said = tmp_path / "starts", []
    flag.write_text("")
    deployment.add("target", loading=aborts(flag, 2))
    server = deployment.server(say=said.append)
    with pytest.raises(StartError, match="the server did not start"):
        server.start()
    assert flag.read_text() == "xx" and server.pids() == {}
    Path(said[-1].removeprefix("the server's log: ")).unlink()


def test_server_unknown_log_level_is_refused(deployment):
    with pytest.raises(ConfigError, match="unknown log level 'warn'; did you mean 'warning'"):
        deployment.server(log_level="warn").start()
