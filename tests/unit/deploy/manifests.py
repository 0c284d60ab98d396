"""The rendered manifests of docker/k8s, and the pods in them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "docker" / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
FOLDERS = {name: K8S / "overlays" / name for name in OVERLAYS} | {"kserve": K8S / "kserve"}
#: Custom resources, by kind, each with the file that its schema was written from.
CUSTOM = {
    {"leaderworkerset": "LeaderWorkerSet", "podmonitor": "PodMonitor", "servingruntime": "ServingRuntime",
     "inferenceservice": "InferenceService"}[path.stem]: json.loads(path.read_text())
    for path in sorted((ROOT / "tests/data/k8s").glob("*.json"))
}  # fmt: skip

Manifest = dict[str, Any]


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    """Return what `kubectl kustomize` makes of a folder; skips where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: the manifests cannot be rendered")
    done = subprocess.run(
        [kubectl, "kustomize", FOLDERS[name]], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(name: str, kind: str) -> dict[str, Manifest]:
    """Return the resources of a kind by their names."""
    return {each["metadata"]["name"]: each for each in rendered(name) if each["kind"] == kind}


def at(manifest: Any, path: str) -> Any:
    """Return what lies at a dotted path."""
    for key in path.split("."):
        manifest = manifest[key]
    return manifest


def pods(name: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the pod templates ({metadata, spec}) of a rendered folder, each with where it is."""
    for each in rendered(name):
        kind, where = each["kind"], f"{each['kind']} {each['metadata']['name']}"
        if kind == "Pod":
            yield where, each
        elif kind in ("Deployment", "Job"):
            yield where, each["spec"]["template"]
        elif kind in CUSTOM:
            for path in CUSTOM[kind]["pods"]:
                pod = at(each, path)
                keys = CUSTOM[kind].get("pod_keys")
                spec = {key: pod[key] for key in keys if key in pod} if keys else pod["spec"]
                yield f"{where} {path.rpartition('.')[2]}", {"metadata": pod.get("metadata", {}), "spec": spec}


def containers(pod: Manifest) -> list[Manifest]:
    """Return a pod's containers, init containers first."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def environment(container: Manifest) -> dict[str, str]:
    """Return a container's variables that have a value in the manifest."""
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


def servers(name: str) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Yield (where, pod, container) of the pods that run the launcher."""
    for where, pod in pods(name):
        for container in containers(pod):
            if any(port["name"] in ("grpc", "h2c") for port in container.get("ports", [])):
                yield where, pod, container
