"""Real servers for the tests of this folder; a server that leaves a process or shared memory fails its tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

import launcher
from benchmarks import deployment as benchmark
from launcher import workfolder
from launcher.server import REPOSITORY, Server
from orchestrator.core.deployment.stubs import is_alive
from tests.support.tiny_models import make_tiny_target

# Servers are started from processes in which gRPC's threads run: its handlers of fork() may break the child before
# it becomes the server. gRPC reads this when it is first imported, by a test.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

FOLDER = Path(__file__).parent
SCRIPTED = FOLDER / "scripted"
#: The files whose tests ask the shipped deployment, and those that ask the tiny `server`.
SHIPPED = ("test_corpus_server", "test_exact", "test_heads_server", "test_sampling")
SHARED = (
    "test_clients_server", "test_continuation", "test_gateway", "test_load", "test_metrics_server", "test_nvidia_clients",
    "test_playground", "test_public",
)  # fmt: skip
#: The names under which clients of NVIDIA's servers ask for the model.
ALIASES = ("ensemble", "tensorrt_llm_bls")
#: How long a server may take to start on a busy machine: its tests wait, and say so, instead of failing.
READY_LIMIT_S, SLOW_START_S = 600, 60
#: The limit of a test here that sets none; the first one of a group waits for its server.
TEST_LIMIT_S = 900


def pytest_configure() -> None:
    """Let SIGTERM end a run as Ctrl-C does, so that the servers it has started are stopped."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder their limit, and begin with the slow files, so that no worker is left with one.

    pytest passes the tests of all folders.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.path.is_relative_to(FOLDER) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))


class ByServer(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives all files that share a server to one worker, and every other file to one."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0]).stem
        if file in SHIPPED:
            return "separate" if "separate" in nodeid else "colocated"
        return "server" if file in SHARED else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer:
    """Distribute the tests by their servers."""
    return ByServer(config, log)


@contextlib.contextmanager
def serving(config: Path, said: list[str] | None = None, **options: Any) -> Iterator[Server]:
    """Run a server, and check at its end that it leaves nothing. said: gets the lines that the launcher prints."""
    said = [] if said is None else said
    server = launcher.Server(config, say=said.append, **{"ready_limit_s": READY_LIMIT_S, **options})
    try:
        with server:
            if server.started_in_s > SLOW_START_S:
                print(f"slow: the server of {config} took {server.started_in_s:.0f} s to start", file=sys.__stderr__)
            pids, regions = server.pids(), server.shared_memory()
            assert regions and len(pids) == 1 + len(server.models)
            yield server
            assert server.failure() in (None, "the server is not running")  # a test may have stopped it
            pids |= server.pids()  # different ones if a process was killed
            regions |= server.shared_memory()
    except BaseException:
        print(*said, sep="\n")
        raise
    assert not [pid for pid in pids if psutil.pid_exists(pid) and is_alive(psutil.Process(pid))]
    assert not [region for region in regions if (workfolder.SHARED_MEMORY / region).exists()]


def deployment(folder: Path, *lines: str, dtype: str = "float64") -> Path:
    """Write a serving.toml for the tiny target, with these additional lines; return its path."""
    text = ['target = "target"', f'dtype = "{dtype}"', "kv_memory_mb = 32", *lines]
    (folder / "serving.toml").write_text("\n".join(text))
    return folder / "serving.toml"


def repository(folder: Path, *real: str, **scripted: str) -> Path:
    """Make a throw-away model repository of links to real models and of scripted models that replace others.

    scripted: {model: file in tests/server/scripted}; the model keeps its real configuration.
    """
    made = folder / "repository"
    made.mkdir()
    for model in real:
        (made / model).symlink_to(REPOSITORY / model)
    for model, script in scripted.items():
        (made / model / "1").mkdir(parents=True)
        (made / model / "config.pbtxt").symlink_to(REPOSITORY / model / "config.pbtxt")
        (made / model / "1/model.py").symlink_to(SCRIPTED / script)
    return made


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random `target` and a tinier `draft`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    shape: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }  # heads of 16 numbers, which native code takes
    make_tiny_target(folder / "target", **shape)
    make_tiny_target(folder / "draft", seed=1, num_hidden_layers=1, **shape)
    return folder


@pytest.fixture
def linked(checkpoints: Path, tmp_path: Path) -> Path:
    """The test's own folder, with links to the tiny checkpoints."""
    return link(checkpoints, tmp_path)


def link(checkpoints: Path, folder: Path) -> Path:
    """Link the tiny checkpoints into a folder; return the folder."""
    for name in ("target", "draft"):
        (folder / name).symlink_to(checkpoints / name)
    return folder


@pytest.fixture(scope="session")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real models over tiny checkpoints, native in float32, with a draft model; for tests that leave it as it was."""
    folder = link(checkpoints, tmp_path_factory.mktemp("server"))
    lines = ('draft = "draft"', "remember_tokens = 10000", f'aliases = "{",".join(ALIASES)}"')
    with serving(deployment(folder, *lines, dtype="float32")) as running:
        yield running


@pytest.fixture(scope="session", params=["colocated"])
def shipped(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The shipped deployment as it is served by default, in float32; for all tests that leave it as it was."""
    drafts = {"SERVING_PLACEMENT": request.param, "SERVING_DRAFT_MAX_SEQUENCES": "64"}  # drafters never rest
    environ = benchmark.ENVIRONMENT | {"SERVING_DTYPE": "float32"} | drafts
    with serving(benchmark.CONFIG, env=environ) as running:
        yield running


#: A test of the shipped deployment with the drafters beside the engine, and once more with a process for each.
both_placements = pytest.mark.parametrize("shipped", ["colocated", "separate"], indirect=True)
