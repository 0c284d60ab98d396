"""What runs while an image is built, and in it: docker/environment.py and docker/healthcheck.py."""

import ast
import http.server
import json
import os
import runpy
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# By their files: a package `docker` may be installed.
environment, healthcheck = (
    SimpleNamespace(**runpy.run_path(str(DOCKER / name))) for name in ("environment.py", "healthcheck.py")
)


@pytest.mark.parametrize("name", ["environment.py", "healthcheck.py"])  # native.py runs behind the packages
def test_script_imports_what_every_container_has(name):
    tree = ast.parse((DOCKER / name).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names | {"pip"}


@pytest.mark.parametrize("extras", [[], ["serve"], ["gateway"]])
def test_packages_are_the_projects_less_what_the_image_has_and_all_are_pinned(extras):
    pinned = {
        environment.name_of(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"
    }
    names = {environment.name_of(word) for word in environment.requirements(PROJECT, extras)}
    assert {"numpy", "tokenizers", "llguidance"} <= names <= pinned | {"torch"}
    assert ("transformers" in names) is ("serve" in extras)
    assert ("fastapi" in names) is ("gateway" in extras)


def test_triton_torch_and_others_are_left_out_as_asked(capsys):
    def printed(*arguments):
        environment.main(["requirements", "serve", *arguments])
        return {environment.name_of(word) for word in capsys.readouterr().out.splitlines()}

    assert not printed() & {"torch", "nvidia-pytriton"}
    assert printed("--all") == printed() | {"torch", "nvidia-pytriton"}
    assert printed("--only", "pydantic") == {"pydantic"}


@pytest.mark.parametrize(
    ("requirement", "lacking"),
    [("numpy>=1.26,<2", False), ("numpy>=9", True), ("numpy", False), ("no-such-package>=1", True)],
)
def test_package_is_lacking_when_it_is_not_there_or_of_another_version(requirement, lacking):
    assert environment.lacking(requirement) is lacking


def test_lacking_packages_are_printed_alone(capsys):
    environment.main(["requirements", "--lacking"])
    assert not capsys.readouterr().out.strip()  # the tests run in an environment that has them all


def test_environment_has_our_code_and_what_lies_behind(tmp_path):
    script = [sys.executable, str(DOCKER / "environment.py"), "make", str(tmp_path / "venv")]
    subprocess.run(script, check=True, cwd=tmp_path)
    program = "import sys, json, orchestrator, numpy; print(json.dumps([orchestrator.__file__, sys.prefix, sys.path]))"
    python = tmp_path / "venv" / "bin" / "python"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-c", program], check=True, cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    code, prefix, path = json.loads(done.stdout)
    assert Path(code).parent.parent == ROOT and prefix == str(tmp_path / "venv")
    own = next(at for at, folder in enumerate(path) if folder.startswith(prefix))
    behind = [
        at for at, folder in enumerate(path) if folder.endswith("site-packages") and not folder.startswith(prefix)
    ]
    assert behind and own < min(behind)
    assert (python.parent / "python3").exists()  # Triton's stub finds its packages through it


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        self.send_response(self.status if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("what", ["server", "gateway"])
@pytest.mark.parametrize(("status", "ready"), [(200, True), (400, False), (503, False)])
def test_healthcheck_is_what_the_launcher_or_the_gateway_says(monkeypatch, what, status, ready):
    host, port = {"server": ("SPECSERVE_HOST", "SPECSERVE_HEALTH_PORT"), "gateway": ("GATEWAY_HOST", "GATEWAY_PORT")}[
        what
    ]
    monkeypatch.setattr(Health, "status", status)
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for address in ("0.0.0.0", "127.0.0.1", ""):
            assert healthcheck.is_ready(what, {host: address, port: str(server.server_port)}) is ready
        server.shutdown()
        thread.join()
    assert healthcheck.is_ready(what, {port: str(server.server_port)}) is False
