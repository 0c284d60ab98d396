"""`python -m auditor` (make audit): proves on a running server that its text is the target's own (docs/auditor.md).

Without --url it starts the shipped deployment in float64 and audits that. The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tritonclient.utils import InferenceServerException

from auditor.auditor import Auditor
from auditor.reference_model import NEAR_TIES, ReferenceModel
from auditor.requests import AuditedSystem, AuditRequest, ask_all
from auditor.results import Result
from auditor.server import AuditedServer
from auditor.settings import inputs_of
from auditor.workload import HEADS, QUICK, SETTINGS, Size
from benchmarks.deployment import CONFIG, serving
from benchmarks.traffic import mixed_prompts
from orchestrator.core.deployment.config import load_config

MAX_SHOWN = 5


@contextlib.contextmanager
def address(options: argparse.Namespace) -> Iterator[str]:
    """Yield the server's gRPC address; without --url, start the shipped deployment first."""
    if options.url:
        yield options.url
        return
    with serving(options.dtype) as server:
        yield server.grpc_url


def supported(system: AuditedSystem, prompt: str, settings: Sequence[str]) -> list[str]:
    """Return the settings that the server accepts, and print those that it refuses."""
    requests = [AuditRequest(name, prompt, {**inputs_of(name, prompt), "max_tokens": 1}) for name in settings]
    answers = ask_all(system, requests)
    for request, answer in zip(requests, answers, strict=True):
        if answer.error:
            print(f"left out: {request.name}: {answer.error}", file=sys.stderr)
    return [request.name for request, answer in zip(requests, answers, strict=True) if not answer.error]


def audit(url: str, options: argparse.Namespace, size: Size) -> list[Result]:
    """Return the results of all checks on the server at `url`."""
    began_s, prompts = time.monotonic(), [prompt.text[-size.characters :] for prompt in mixed_prompts(size.prompts)]

    def report_progress(text: str) -> None:
        print(f"{time.monotonic() - began_s:5.0f} s: {text}", file=sys.stderr, flush=True)

    with AuditedServer(url) as system:
        settings = supported(system, prompts[0], options.settings)
        reference = ReferenceModel(options.checkpoint, options.dtype)
        return Auditor(reference, system, prompts, size, settings, report_progress).run()


def table(results: Sequence[Result]) -> str:
    """Return the report as text: a line for each check, then its bounds and its first findings."""
    width = max(len(result.check) for result in results)
    lines = [f"{'check':<{width}}  findings  near ties  examined"]
    for result in results:
        examined = ", ".join(f"{number} {what}" for what, number in result.counts.items())
        num_ties = sum(finding.near_tie for finding in result.findings)
        lines.append(f"{result.check:<{width}}  {len(result.faults):>8}  {num_ties:>9}  {examined}")
        lines += [f"{'':<{width}}  {bound}" for bound in result.bounds]
        lines += [f"  ! {finding}" for finding in result.findings[:MAX_SHOWN]]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Size]:
    """Return the command's arguments, and the size of the audit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="gRPC address of a running server; without it the shipped deployment is started")
    parser.add_argument("--checkpoint", default=load_config(CONFIG).target, help="the target's folder (%(default)s)")
    parser.add_argument("--dtype", default="float64", choices=NEAR_TIES, help="the served dtype (%(default)s)")
    parser.add_argument(
        "--settings", nargs="+", default=[*SETTINGS, *HEADS], choices=[*SETTINGS, *HEADS], help="drafting methods"
    )
    parser.add_argument("--quick", action="store_true", help="a minute's worth; the sizes below take precedence")
    for name, text in (
        ("prompts", "prompts"),
        ("tokens", "tokens per request"),
        ("seeds", "draws per distribution, 0 to skip them"),
    ):
        shipped, quick = getattr(Size(), name), getattr(QUICK, name)
        parser.add_argument(f"--{name}", type=int, help=f"{text} ({shipped}, quick: {quick})")
    parser.add_argument("--json", type=Path, help="file to write the report to as well")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in ("prompts", "tokens", "seeds")}
    return options, replace(QUICK if options.quick else Size(), **{k: n for k, n in given.items() if n is not None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit and report; return 1 if there is a fault, 2 if there is no server."""
    options, size = parse(arguments)
    try:
        with address(options) as url:
            results = audit(url, options, size)
    except InferenceServerException as error:
        print(f"error: no server at {options.url}: {error.message()}", file=sys.stderr)
        return 2
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([result.to_dict() for result in results], indent=1) + "\n")
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    sys.exit(main())
