"""`make profile`: flame graphs of the server's Python processes while requests run, one SVG for each process.

A step then shows as its parts: in `target` the engine's thread with propose, forward and verify; in `speculative` the
threads of the requests. The profiler, py-spy, attaches to running processes, which the system must allow.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import tritonclient.grpc as grpcclient

import launcher
from benchmarks.deployment import CONFIG
from benchmarks.samples import BenchError
from benchmarks.server import Method
from benchmarks.traffic import read_prompts
from orchestrator.core.errors import ServingError

# py-spy needs a moment to attach and to write, beyond the time that it records.
GRACE_S = 60.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="the deployment")
    parser.add_argument("--method", default="prompt_lookup", help='method, or method:{"parameter": value}')
    parser.add_argument("--seconds", type=int, default=10, help="how long to record (%(default)s)")
    parser.add_argument("--rate", type=int, default=500, help="samples per second (%(default)s)")
    parser.add_argument("--users", type=int, default=1, help="requests at once (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder of the graphs (%(default)s)")
    return parser.parse_args(arguments)


def profiler() -> str:
    """Return the path of py-spy; raises BenchError if it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if not found:
        raise BenchError("py-spy is not installed: make profile installs it, as does pip install '.[profile]'")
    return found


def record(server: launcher.Server, args: argparse.Namespace) -> list[Path]:
    """Record the target and the public model; return the graphs. Raises BenchError when py-spy cannot attach."""
    args.out.mkdir(parents=True, exist_ok=True)
    command = [profiler(), "record", "--threads", "--duration", str(args.seconds), "--rate", str(args.rate)]
    processes = {name: pid for pid, name in server.pids().items() if name in ("target", "speculative")}
    running = {
        args.out / f"{name}.svg": subprocess.Popen(
            [*command, "--pid", str(pid), "--output", str(args.out / f"{name}.svg")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, pid in processes.items()
    }
    for graph, process in running.items():
        _, said = process.communicate(timeout=args.seconds + GRACE_S)
        if process.returncode:
            reason = said.strip().splitlines()[-1] if said.strip() else "no reason"
            raise BenchError(
                f"py-spy could not record {graph.stem}: {reason}"
                " (it needs the capability SYS_PTRACE in a container, or kernel.yama.ptrace_scope = 0, or root)"
            )
    return list(running)


def keep_asking(url: str, method: str, stop: threading.Event) -> None:
    """Send one request after another until `stop` is set."""
    prompts = [prompt for task in read_prompts().values() for prompt in task]
    with grpcclient.InferenceServerClient(url) as client:
        runner = Method.parse(method, client, {})
        fitting = [prompt for prompt in prompts if runner.fits(prompt)]
        while not stop.is_set():
            runner.run(fitting[0], 128)
            fitting.append(fitting.pop(0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, and print where the graphs are; return the exit status."""
    args, stop = parse(arguments), threading.Event()
    try:
        profiler()
        with launcher.Server(args.config) as server:
            asking = (server.grpc_url, args.method, stop)
            users = [threading.Thread(target=keep_asking, args=asking, daemon=True) for _ in range(args.users)]
            for user in users:
                user.start()
            try:
                graphs = record(server, args)
            finally:
                stop.set()
                for user in users:
                    user.join(GRACE_S)
    except ServingError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, graphs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
