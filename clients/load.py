"""`make load`: each method with each number of users at once, on a server of its own or a running one (docs/load.md).

Each cell is one run of clients/locustfile.py. Cells are kept in a JSON file, so that a matrix can be measured in
pieces, and the report is made of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import launcher
from clients.demo import DRAFTERS
from clients.load_report import Cell, cell_of, median_of, to_html, to_markdown

ROOT = Path(__file__).resolve().parent.parent
LOCUSTFILE = ROOT / "clients/locustfile.py"
PROMPTS = ROOT / "tests/data/prompts"
#: Protocol → the user class of the locustfile.
USERS = {"grpc": "GrpcStream", "http": "HttpStream", "openai": "OpenAIStream"}
METHODS = "none,prompt_lookup,suffix,ngram,draft_model,eagle2"
# Long prompts measure the prefill, and have their own figures (make bench).
TASKS = ("completion", "edit", "repetitive", "docstring")
STOP_LIMIT_S = 60
#: Seconds that locust needs beside the run: for imports, workers that connect, streams that end.
EXTRA_S = 120


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(prog="load", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--methods", default=METHODS, help="drafting methods (%(default)s); none comes first, its texts are the measure"
    )
    add("--users", default="1,4,16,64", help="numbers of users at once (%(default)s)")
    add("--rounds", type=int, default=1, help="runs of each cell, by turns; the median one is kept (%(default)s)")
    add("--seconds", type=int, default=20, help="length of each run (%(default)s)")
    add("--warm-up", type=float, default=4.0, help="seconds at its beginning that do not count (%(default)s)")
    add("--max-tokens", type=int, default=64, help="most tokens of each text (%(default)s)")
    add("--prompts", type=Path, help="JSONL or text file, or folder of them (default: four tasks of the held-out sets)")
    add("--protocol", choices=USERS, default="grpc", help="how the users ask (%(default)s)")
    add("--url", help="a running server's gRPC, HTTP or gateway address (default: start one)")
    add("--config", type=Path, default=ROOT / "serving.toml", help="deployment of the server to start (%(default)s)")
    add(
        "--workers",
        type=int,
        default=0,
        help="locust processes that make the load; 0 = one, which also keeps the books",
    )
    add("--json", type=Path, default=ROOT / "load.json", help="cells measured so far, and the new ones (%(default)s)")
    add("--html", type=Path, default=ROOT / "load.html", help="the report (%(default)s)")
    add("--report-only", action="store_true", help="make the report of the cells that there are")
    args = parser.parse_args(arguments)
    if args.protocol == "openai" and not args.url:
        parser.error("--protocol openai needs the gateway's address (--url)")
    if args.warm_up >= args.seconds:
        parser.error(f"--warm-up must be below --seconds, got {args.warm_up:g} and {args.seconds}")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    args.methods = sorted(args.methods.split(","), key=lambda method: method != "none")
    args.users = [int(users) for users in args.users.split(",")]
    return args


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """Yield the address of the server; a server started here loads only the drafters that the methods need."""
    if args.url:
        yield args.url
        return
    needed = {DRAFTERS.get(name, "") for method in args.methods for name in method.split("+")}
    unneeded = {f"SERVING_{key.upper()}": "" for key in set(DRAFTERS.values()) - needed}
    with launcher.Server(args.config, env=unneeded) as server:
        print(server.ready_line(), flush=True)
        yield server.grpc_url if args.protocol == "grpc" else server.http_url


@contextlib.contextmanager
def prompt_folder(prompts: Path | None) -> Iterator[Path]:
    """Yield the prompts' file or folder."""
    if prompts:
        yield prompts
        return
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS:
            (Path(folder) / f"{task}.jsonl").symlink_to(PROMPTS / f"{task}.jsonl")
        yield Path(folder)


class Runs:
    """Runs of locust against one server. folder: for records, logs, and the texts that all runs are compared by."""

    def __init__(self, args: argparse.Namespace, url: str, prompts: Path, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._command = [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), USERS[args.protocol], "--headless"),
            *("--stop-timeout", str(STOP_LIMIT_S), "--only-summary", "--loglevel", "WARNING"),
            *(f"--{args.protocol}", url, "--prompts", str(prompts), "--max-tokens", str(args.max_tokens)),
        ]

    def run(self, method: str, users: int) -> Cell:
        """Measure one cell; raises CalledProcessError if locust itself fails."""
        args, records = self._args, self._folder / f"{secrets.token_hex(4)}.jsonl"
        log = records.with_suffix(".log")
        command = [
            *self._command,
            *("--methods", method, "-u", str(users), "-t", f"{args.seconds}s", "--records", str(records)),
            *("--texts", str(self._folder / "texts.json"), "--cache-salt", records.stem),
        ]
        with log.open("w") as out:
            status = self._run(command, out)
        lines = records.read_text().splitlines() if records.exists() else []
        # Status 1: some requests failed, which the cell counts.
        if status not in (0, 1) or not lines:
            raise subprocess.CalledProcessError(status, command[:3], log.read_text())
        return cell_of([json.loads(line) for line in lines], method, users, args.warm_up, args.seconds)

    def _run(self, command: Sequence[str], out: Any) -> int:
        """Run locust alone, or a master and its workers; return the exit status."""
        limit_s = self._args.seconds + STOP_LIMIT_S + EXTRA_S
        if not self._args.workers:
            return subprocess.run(command, stdout=out, stderr=out, timeout=limit_s, check=False).returncode
        port = str(launcher.free_ports().http)
        workers = str(self._args.workers)
        master = [*command, "--master", "--expect-workers", workers, "--master-bind-port", port]
        with contextlib.ExitStack() as stack:
            for _ in range(self._args.workers):
                worker = subprocess.Popen([*command, "--worker", "--master-port", port], stdout=out, stderr=out)
                stack.callback(worker.wait, limit_s)
                stack.callback(worker.terminate)
            return subprocess.run(master, stdout=out, stderr=out, timeout=limit_s, check=False).returncode


def measure(args: argparse.Namespace, cells: list[Cell]) -> None:
    """Measure the matrix; each new cell replaces the old one, and is saved at once.

    A shared machine's speed changes from minute to minute, so the runs of one cell do not follow one another directly.
    """
    with serving(args) as url, prompt_folder(args.prompts) as prompts, tempfile.TemporaryDirectory() as folder:
        runs = Runs(args, url, prompts, Path(folder))
        measured: defaultdict[tuple[str, int], list[Cell]] = defaultdict(list)
        for _ in range(args.rounds):
            for users in args.users:
                for method in args.methods:
                    measured[method, users].append(runs.run(method, users))
                    print(measured[method, users][-1].line(), flush=True)
                    cell = median_of(measured[method, users])
                    cells[:] = [old for old in cells if (old.method, old.users) != (method, users)] + [cell]
                    args.json.write_text(json.dumps([old._asdict() for old in cells], indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a request failed or a text differed, 2 if nothing could be measured."""
    args = parse(arguments)
    cells = [Cell(**cell) for cell in json.loads(args.json.read_text())] if args.json.exists() else []
    try:
        if not args.report_only:
            measure(args, cells)
        args.html.write_text(to_html(cells), encoding="utf-8")
    except subprocess.CalledProcessError as error:
        print(f"error: locust ended with status {error.returncode}:\n{error.output}", file=sys.stderr)
        return 2
    except (launcher.ServingError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(to_markdown(cells), f"\nreport: {os.path.relpath(args.html)}, cells: {os.path.relpath(args.json)}", sep="\n")
    return 1 if any(cell.num_errors for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
