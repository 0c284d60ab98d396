"""A throw-away deployment: a real tritonserver over a model of ten lines, in a folder of its own."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import psutil

import launcher
from launcher import workfolder
from tests.support.clients import post

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "x" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
MODEL = """
import os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils
from orchestrator.core.deployment.config import load_config

class TritonPythonModel:
    def initialize(self, args):
        self.config = load_config(os.environ["SERVING_CONFIG"])
        LOADING

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            time.sleep(max(0, -int(x[0])))
            y = x + self.config.max_nodes if x[0] else np.array([os.getpid()], np.int32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y.astype(np.int32))]))
        return answers
"""


class Deployment:
    """A repository and a serving.toml in a folder."""

    def __init__(self, folder):
        self.folder, self.repository = folder, folder / "repository"
        self.config = folder / "serving.toml"
        self.config.write_text('target = "checkpoint"\nmax_nodes = 5\n')
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint/config.json").write_text("{}")
        self.add("target")

    def leaves_nothing(self, *regions):
        return not any(region.exists() for region in regions) and not list((self.folder / "temporary").iterdir())

    def add(self, model, loading="pass"):
        (self.repository / model / "1").mkdir(parents=True, exist_ok=True)
        (self.repository / model / "config.pbtxt").write_text(CONFIG)
        (self.repository / model / "1/model.py").write_text(MODEL.replace("LOADING", loading))

    def server(self, **options):
        return launcher.Server(self.config, repository=self.repository, **options)

    def command(self, **environ):
        return launcher_command(self.config, self.repository, **environ)

    def fails(self, **environ):
        """Run the launcher to its end; return its status and the lines that it wrote to stderr."""
        running = self.command(**environ)
        _, errors = running.communicate(timeout=60)
        return running.returncode, errors.splitlines()


def launcher_command(config, repository, **environ):
    """Start `python -m launcher` on free ports."""
    ports = {f"SPECSERVE_{name.upper()}_PORT": port for name, port in asdict(launcher.free_ports()).items()}
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", str(config), "--model-repository", str(repository)],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in {**ports, **environ}.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def make_deployment(folder, monkeypatch):
    """Return a Deployment whose launchers keep their work folders apart from those of other servers."""
    temporary = folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return Deployment(folder)


@contextlib.contextmanager
def launched(deployment):
    """Start a launcher; yield (process, its ready line)."""
    started = deployment.command()
    try:
        yield started, started.stdout.readline()
    finally:
        started.terminate()
        started.communicate(timeout=30)


def infer(url, x):
    """Return the model's answer; raises OSError if there is none."""
    inputs = [{"name": "x", "datatype": "INT32", "shape": [1], "data": [x]}]
    answer = post(url, "/v2/models/target/infer", {"inputs": inputs})
    if answer.status != 200:
        raise OSError(answer.body)
    return answer.body["outputs"][0]["data"][0]


def url_in(line):
    return re.search(r"http://[\d.]+:\d+", line)[0]


def server_of(launcher_pid):
    """Return the process id of the tritonserver that a launcher has started."""
    children = psutil.Process(launcher_pid).children()
    return next(child.pid for child in children if child.name() == "tritonserver")


def region_of(url):
    """Return the shared-memory region of the model's process, whose name is an argument of the stub."""
    region = workfolder.SHARED_MEMORY / psutil.Process(infer(url, 0)).cmdline()[2]
    assert region.exists()
    return region


def find_server(launcher_pid):
    try:
        return server_of(launcher_pid)
    except (StopIteration, psutil.Error):
        return None


def answers_from_another(url, stub):
    try:
        return infer(url, 0) != stub
    except OSError:
        return False
