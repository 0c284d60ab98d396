"""The pods of the overlay cpu-demo on `podman kube play`: two servers and a gateway, with what a kubelet does to them.

podman 4.3 is no kubelet: it publishes every port of a container on the host, knows neither an `emptyDir` in memory nor
`fsGroup`, neither startup nor readiness probes, no preStop and no Services. So each pod is played without ports and
probes, its volumes are made beforehand, the headless Service becomes an entry of the gateway's hosts file, and this
file sends the probes, runs preStop before SIGTERM, and waits as the manifests say.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.images.checks import CheckFailed, check_kill, check_same, get, num_usable, streamed, succeeds, wait_for
from tests.images.engine import ROOT, Engine

OVERLAY = ROOT / "docker" / "k8s" / "overlays" / "cpu-demo"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
NETWORK, SUBNET = "specserve", "10.89.7.0/24"
ADDRESSES = {"server-0": "10.89.7.10", "server-1": "10.89.7.11", "gateway-0": "10.89.7.20"}
SERVERS = {name: address for name, address in ADDRESSES.items() if name.startswith("server")}
GATEWAY = ADDRESSES["gateway-0"], 9000
#: runc without the limits of processes and files: podman sets higher ones than some machines permit.
RUNTIME = """\
#!/usr/bin/env python3
import json, os, sys
words = sys.argv[1:]
for option, word in zip(words, words[1:]):
    path = {"--bundle": os.path.join(word, "config.json"), "--process": word}.get(option)
    if path:
        spec = json.load(open(path))
        spec.get("process", spec).pop("rlimits", None)
        json.dump(spec, open(path, "w"))
os.execvp("runc", ["runc", *words])
"""
SETTINGS = '[engine]\nruntime = "plain"\n[engine.runtimes]\nplain = ["{folder}/plain"]\n'


class Podman(Engine):
    """podman with images, containers and networks of its own."""

    def __init__(self, folder: Path) -> None:
        (folder / "plain").write_text(RUNTIME)
        (folder / "plain").chmod(0o755)
        (folder / "containers.conf").write_text(SETTINGS.format(folder=folder))
        super().__init__({**os.environ, "CONTAINERS_CONF": f"{folder}/containers.conf"})
        where = {"root": "storage", "runroot": "run", "network-config-dir": "networks", "tmpdir": "tmp"}
        self._program = (
            "podman",
            "--cgroup-manager=cgroupfs",
            *(f"--{key}={folder / at}" for key, at in where.items()),
        )

    def __call__(self, *words: str, limit_s: float = 300.0, **options: Any) -> str:
        """Run a podman command and return what it printed; raises CheckFailed with its last lines."""
        return self.run(*self._program, *words, limit_s=limit_s, **options)


class Pods:
    """The running pods and their manifests, by name."""

    def __init__(self, podman: Podman, folder: Path) -> None:
        self._podman, self._folder = podman, folder
        rendered = list(yaml.safe_load_all(podman.run("kubectl", "kustomize", str(OVERLAY))))
        self._maps = [each for each in rendered if each["kind"] == "ConfigMap"]
        self._templates = {
            each["metadata"]["name"]: each["spec"]["template"] for each in rendered if each["kind"] == "Deployment"
        }
        shutil.copytree(ROOT / "models", folder / "models")  # podman gives a volume's folder to the pod's user
        podman("volume", "create", "--opt=type=none", f"--opt=device={folder}/models", "--opt=o=bind", "models")
        podman("network", "create", f"--subnet={SUBNET}", NETWORK)
        for each in self._maps:
            each["metadata"].pop("namespace")

    def spec(self, name: str) -> dict[str, Any]:
        """Return the pod's specification as it is rendered."""
        return dict(self._templates[name.rpartition("-")[0]]["spec"])

    def container(self, name: str) -> dict[str, Any]:
        """Return the specification of the pod's one container."""
        (container,) = self.spec(name)["containers"]
        return dict(container)

    def play(self, name: str) -> None:
        """Start a pod from its Deployment's template."""
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(self._templates[name.rpartition("-")[0]])}
        pod["metadata"]["name"] = name
        spec = pod["spec"]
        (container,) = spec["containers"]
        container["image"] = f"localhost/{container['image']}"
        for key in ("ports", *PROBES):
            container.pop(key)
        volumes = [volume for volume in spec["volumes"] if "emptyDir" in volume]
        folders = [self._make_empty(volume, f"{name}-{volume['name']}", container) for volume in volumes]
        if name.startswith("gateway"):
            spec["hostAliases"] = [{"ip": address, "hostnames": ["server-replicas"]} for address in SERVERS.values()]
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump_all([*self._maps, pod]))
        self._podman("kube", "play", f"--network={NETWORK}", f"--ip={ADDRESSES[name]}", str(file))
        for folder in folders:
            folder.chmod(0o1777)  # podman has given it the mode that the folder has in the image

    def _make_empty(self, volume: dict[str, Any], name: str, container: dict[str, Any]) -> Path:
        """Make a pod's empty folder, in memory or on disk, with a unique name, because podman's pods share volumes."""
        for mount in container["volumeMounts"]:
            mount["name"] = name if mount["name"] == volume["name"] else mount["name"]
        volume["name"] = name
        where = Path("/dev/shm") if volume["emptyDir"].get("medium") == "Memory" else self._folder
        folder = where / f"{self._folder.parent.name}-{name}"
        folder.mkdir()
        self._podman("volume", "create", "--opt=type=none", f"--opt=device={folder}", "--opt=o=bind", name)
        return folder

    def probe(self, name: str, probe: str) -> int:
        """Send a probe as the manifest says; return the HTTP status, 0 without an answer."""
        container = self.container(name)
        asked = container[probe]["httpGet"]
        (port,) = (each["containerPort"] for each in container["ports"] if each["name"] == asked["port"])
        try:
            return get(port, asked["path"], host=ADDRESSES[name])[0]
        except OSError:
            return 0

    def wait_until_started(self, name: str) -> float:
        """Wait for the startup probe as long as the manifest allows; return the seconds."""
        startup = self.container(name)["startupProbe"]
        limit_s = startup["failureThreshold"] * startup["periodSeconds"]
        took_s = wait_for(lambda: self.probe(name, "startupProbe") == 200, f"the startup probe of {name}", limit_s)
        if self.probe(name, "livenessProbe") != 200:
            raise CheckFailed(f"{name} has started, but is not live")
        return took_s

    def kill(self, name: str) -> None:
        """Kill the container's first process, as the kernel does when memory runs out."""
        os.kill(int(self._inspect(name, "{{.State.Pid}}")), signal.SIGKILL)

    def end(self, name: str) -> tuple[float, int]:
        """Run preStop, then stop the container, within the grace period; return the seconds and the exit status."""
        began_s = time.monotonic()
        command = self.container(name)["lifecycle"]["preStop"]["exec"]["command"]
        grace_s = float(self.spec(name)["terminationGracePeriodSeconds"])
        self._podman("exec", self._container_name(name), *command, limit_s=grace_s)
        self._podman("stop", f"--time={max(grace_s - (time.monotonic() - began_s), 0):.0f}", self._container_name(name))
        return time.monotonic() - began_s, int(self._inspect(name, "{{.State.ExitCode}}"))

    def _container_name(self, name: str) -> str:
        """Return the name that podman gives the pod's one container."""
        return f"{name}-{self.container(name)['name']}"

    def _inspect(self, name: str, template: str) -> str:
        return self._podman("inspect", "--format", template, self._container_name(name))

    def logs(self) -> str:
        """Return the last log lines of every container that still exists."""
        names = self._podman("ps", "--all", "--format", "{{.Names}}").split()
        return "\n".join(f"{name}:\n{self._podman('logs', '--tail=20', name)}" for name in names)


def check_pods(engine: Engine, folder: Path, images: list[str]) -> None:
    """Play the pods on the engine's images; kill the server that runs a stream, then end it while more streams run."""
    with _pods(engine, folder, images) as pods:
        for name in ADDRESSES:
            pods.play(name)
        for name in ADDRESSES:
            print(f"pods: {name} has started after {pods.wait_until_started(name):.1f} s more", flush=True)
        wait_for(lambda: num_usable(*GATEWAY) == 2, "both servers behind the gateway", 60)
        undisturbed = streamed(*GATEWAY)
        name = check_kill(*GATEWAY, SERVERS, pods.kill, undisturbed)
        print(f"pods: the same text from {name}, which was killed meanwhile", flush=True)
        print(f"pods: {name} serves again {pods.wait_until_started(name):.1f} s after the stream's end", flush=True)
        wait_for(lambda: num_usable(*GATEWAY) == 2, "the killed server behind the gateway", 60)
        _check_end(pods, name, undisturbed)


def _check_end(pods: Pods, name: str, undisturbed: str) -> None:
    """End a server while stream follows stream: no text may differ, it must not be ready, and all pods end with 0."""
    ends: list[tuple[float, int]] = []
    statuses: set[int] = set()
    ending = threading.Thread(target=lambda: ends.append(pods.end(name)))

    def watch() -> None:
        while ending.is_alive():
            statuses.add(pods.probe(name, "readinessProbe"))
            time.sleep(0.1)

    ending.start()
    watching = threading.Thread(target=watch)
    watching.start()
    num_texts = 0
    while ending.is_alive():
        check_same(undisturbed, streamed(*GATEWAY), "a server that ends")
        num_texts += 1
    watching.join(30)
    if 503 not in statuses:
        raise CheckFailed(f"{name}, which drained, answered its readiness probe with {statuses}")
    print(f"pods: {num_texts} times the same text while {name} drained and ended", flush=True)
    ends += [pods.end(each) for each in ADDRESSES if each != name]
    print(f"pods: ended by preStop and SIGTERM in {', '.join(f'{took_s:.1f}' for took_s, _ in ends)} s", flush=True)
    if [status for _, status in ends] != [0, 0, 0]:
        raise CheckFailed(f"the pods ended with {ends}")


@contextmanager
def _pods(engine: Engine, folder: Path, images: list[str]) -> Iterator[Pods]:
    """Give podman the images and make the pods; at the end, remove everything again."""
    folder = folder / "pods"
    folder.mkdir()
    podman = Podman(folder)
    try:
        engine("save", "--output", f"{folder}/images.tar", *images)
        podman("load", "--quiet", f"--input={folder}/images.tar")
        (folder / "images.tar").unlink()
        pods = Pods(podman, folder)
        try:
            yield pods
        except BaseException:
            print(pods.logs(), flush=True)
            raise
    finally:
        _remove(podman, folder)


def _remove(podman: Podman, folder: Path) -> None:
    """Remove whatever there is; the bridge of the network too, which podman leaves behind."""
    bridges: list[str] = []
    steps: tuple[Callable[[], object], ...] = (
        lambda: podman("pod", "rm", "--all", "--force"),
        lambda: podman("volume", "rm", "--all", "--force"),
        lambda: bridges.append(podman("network", "inspect", "--format", "{{.NetworkInterface}}", NETWORK)),
        lambda: podman("network", "rm", NETWORK),
        lambda: podman.run("ip", "link", "delete", *bridges),
        lambda: podman("system", "reset", "--force"),
    )
    for step in steps:
        succeeds(step)
    for left in Path("/dev/shm").glob(f"{folder.parent.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
