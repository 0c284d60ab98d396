"""`python -m build.trtllm.check`: the first run on a GPU; small engines are built, served, compared and measured.

For each case: plan, build, serve, and compare greedy text with the torch engine on the same weights; then one report.
Each stage is a process of its own with a time limit, so that a library that hangs or aborts ends its stage only. What
fails is reported with the assumption of this repository that it contradicts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from build.trtllm.check_assumptions import assumption_of
from build.trtllm.check_stages import STAGES, run_stage
from orchestrator.core.errors import ConfigError
from orchestrator.core.methods import METHODS

TINY_LLAMA, VICUNA = "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "lmsys/vicuna-7b-v1.3"
#: Method → the smallest public checkpoints that it is known to have: (target, drafter or heads).
CASES: dict[str, tuple[str, str]] = {
    "none": (TINY_LLAMA, ""),
    "prompt_lookup": (TINY_LLAMA, ""),
    "draft_model": (TINY_LLAMA, "JackFram/llama-68m"),
    "lookahead": (TINY_LLAMA, ""),
    "medusa": (VICUNA, "FasterDecoding/medusa-vicuna-7b-v1.3"),
    "eagle": (VICUNA, "yuhuili/EAGLE-Vicuna-7B-v1.3"),
    "eagle2": (VICUNA, "yuhuili/EAGLE-Vicuna-7B-v1.3"),
    "redrafter": (TINY_LLAMA, ""),  # no small public one is known: it is trained here first
}
LIMITS_S = {"heads": 7200.0, "plan": 120.0, "build": 3600.0, "torch": 900.0, "engine": 900.0, "compare": 60.0}
_TAIL = 4000


@dataclass
class Outcome:
    """How a stage of a case ended; status: ok, failed, timed out, skipped. assumption: what a failure contradicts."""

    case: str
    stage: str
    status: str
    seconds: float = 0.0
    assumption: str = ""
    found: dict[str, object] = field(default_factory=dict)
    tail: str = ""


def check(cases: dict[str, tuple[str, str]], folder: Path, options: argparse.Namespace) -> list[Outcome]:
    """Run the stages of every case; after a failed stage only the rest of its own case is skipped."""
    outcomes: list[Outcome] = []
    for case, (target, drafter) in cases.items():
        is_broken = False
        for stage in stages_of(case, drafter):
            outcome = Outcome(case, stage, "skipped")
            if not is_broken:
                job = {"case": case, "target": target, "drafter": drafter, "gpu": options.gpu}
                job |= {"folder": str(folder / case), "device": options.device, "repository": options.model_repository}
                job |= {"examples": options.examples_dir, "heads_tokens": str(options.heads_tokens)}
                job |= {"heads_corpus": options.heads_corpus}
                outcome = _run(case, stage, job, options.limit_s or LIMITS_S[stage])
            is_broken = outcome.status != "ok"
            outcomes.append(outcome)
            print(f"{case:14} {stage:8} {outcome.status:9} {outcome.seconds:7.1f} s  {outcome.assumption}", flush=True)
            write_report(folder, outcomes)
    return outcomes


def stages_of(case: str, drafter: str) -> list[str]:
    """Return the stages of a case; heads that have no checkpoint are trained first."""
    is_trained = bool(METHODS[case].drafter) and not drafter
    return [stage for stage in STAGES if stage != "heads" or is_trained]


def _run(case: str, stage: str, job: dict[str, str], limit_s: float) -> Outcome:
    """Run a stage in a process group of its own, which ends with it."""
    began, folder = time.monotonic(), Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    log, result = folder / f"{stage}.log", folder / f"{stage}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "build.trtllm.check", "--stage", stage, "--job", json.dumps(job)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = "ok" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            _end(process)
    seconds, text = time.monotonic() - began, log.read_text(encoding="utf-8", errors="replace")
    if status == "ok":
        return Outcome(case, stage, status, seconds, found=json.loads(result.read_text(encoding="utf-8")))
    return Outcome(case, stage, status, seconds, assumption_of(stage, text), tail=text[-_TAIL:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage's process; the launcher in it is given time to end its server."""
    for sign, wait_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 10.0)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sign)
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue


def write_report(folder: Path, outcomes: list[Outcome]) -> None:
    """Write report.json and report.md, which can be sent back as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"python": sys.version, "gpus": _gpus(), "outcomes": [asdict(outcome) for outcome in outcomes]}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = ["# First run of the TensorRT-LLM path\n", *(f"- {gpu}" for gpu in _gpus()), ""]
    lines += ["| case | stage | status | s | found, or the assumption that broke |", "|---|---|---|---:|---|"]
    for each in outcomes:
        told = each.assumption or ", ".join(f"{key} {value}" for key, value in each.found.items())
        lines.append(f"| {each.case} | {each.stage} | {each.status} | {each.seconds:.1f} | {told} |")
    for each in outcomes:
        if each.tail:
            lines += ["", f"## {each.case}, {each.stage}: {each.status}", "", "```text", each.tail, "```"]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi: {error}"]


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(
        prog="python -m build.trtllm.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, metavar="DIR", help="where engines, logs and report.md go")
    made.add_argument("--gpu", default="h100", help="the GPU, as in the engines' file")
    made.add_argument("--cases", default=",".join(CASES), metavar="METHOD,…", help="methods to check (default: all)")
    made.add_argument("--target", default="", help="another target for every case: a folder or a hub id")
    made.add_argument("--drafter", default="", help="another drafter, for cases that have one")
    made.add_argument("--heads-tokens", type=int, default=300_000, help="to train a head with that has no checkpoint")
    made.add_argument("--heads-corpus", default="", help="its text, as of build.heads (default: standard library)")
    made.add_argument("--device", default="cuda", help="of the torch engine, and of training")
    made.add_argument("--examples-dir", default="/app/examples", metavar="DIR", help="TensorRT-LLM's examples")
    made.add_argument("--model-repository", default="", metavar="DIR", help="another than the launcher's own")
    made.add_argument("--limit-s", type=float, default=0.0, help="limit of each stage (default: by stage)")
    made.add_argument("--dry-run", action="store_true", help="print cases, stages and limits only")
    made.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    made.add_argument("--job", default="", help=argparse.SUPPRESS)
    return made


def cases_of(options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return the chosen cases; raises ConfigError for an unknown one."""
    chosen = options.cases.split(",")
    if unknown := [case for case in chosen if case not in CASES]:
        raise ConfigError(f"unknown case {unknown[0]!r} (allowed: {', '.join(CASES)}; flag --cases)")
    return {
        case: (options.target or CASES[case][0], METHODS[case].drafter and (options.drafter or CASES[case][1]))
        for case in chosen
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, or one stage of one; return the exit status."""
    options = parser().parse_args(arguments)
    if options.stage:
        return run_stage(options.stage, json.loads(options.job))
    try:
        cases = cases_of(options)
        if options.dry_run or options.out is None:
            for case, (target, drafter) in cases.items():
                limits = {stage: options.limit_s or LIMITS_S[stage] for stage in stages_of(case, drafter)}
                stages = ", ".join(f"{stage} ≤ {limit_s:.0f} s" for stage, limit_s in limits.items())
                print(f"{case}: {target}{f' + {drafter}' if drafter else ''}: {stages}")
            return 0
        outcomes = check(cases, options.out.absolute(), options)
    except ConfigError as error:
        print(f"trtllm: {error}", file=sys.stderr)
        return 2
    print(options.out / "report.md")
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
