"""The figures as Markdown and JSON, and the conditions under which they were measured."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.figures import Comparison, Ratio, Row
from benchmarks.samples import Sample
from benchmarks.server import ConcurrentRun
from clients.generate import ratio
from orchestrator.core.deployment.config import ServingConfig

PACKAGES = ("numpy", "tokenizers", "torch", "transformers", "tritonclient", "nvidia-pytriton")


def conditions(config: ServingConfig, triton: str) -> dict[str, Any]:
    """Return the machine, versions, weights and deployment that the figures depend on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "device": config.device,
        "dtype": config.dtype,
        "target": weights_hash(config.target),
        "draft": weights_hash(config.draft),
        "python": platform.python_version(),
        "triton": triton,
        **{name: _version(name) for name in PACKAGES},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def weights_hash(checkpoint: str) -> str:
    """Return the first digits of the SHA-256 of a checkpoint's weights; a hub id is returned as it is."""
    digest = hashlib.sha256()
    files = sorted(Path(checkpoint).glob("*.safetensors")) if checkpoint else []
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16] if files else checkpoint


def table(rows: Sequence[Row]) -> str:
    """Return one Markdown table of all tasks."""
    lines = [
        "| task | runner | tokens/s | ms a step | speed-up (95 %) | slower | acceptance length (95 %) | without bonus "
        "| drafts accepted | first token | same text |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join(lines + [f"| {' | '.join(_cells(row))} |" for row in rows])


def _cells(row: Row) -> list[str]:
    drafts = "–" if row.draft_acceptance_rate is None else f"{100 * row.draft_acceptance_rate:.0f} %"
    return [
        row.task,
        row.runner,
        f"{row.tokens_per_s.overall:.0f}",
        f"{1000 * row.step_s:.2f}",
        ratio_text(row.speed_up),
        f"{100 * row.share_slower:.0f} %",
        f"{row.acceptance_length:.2f} ({row.acceptance_interval[0]:.2f}–{row.acceptance_interval[1]:.2f})",
        f"{row.acceptance_length_without_bonus:.2f}",
        drafts,
        f"{1000 * row.first_token_s.quartiles[1]:.0f} ms",
        f"{row.num_same_text}/{row.num_runs}",
    ]


def split_table(samples: Sequence[Sample]) -> str:
    """Return a Markdown table of the parts of a step, in ms, the median over the runs of each of our methods."""
    found: dict[str, list[Mapping[str, float]]] = {}
    for sample in samples:
        if sample.run.step_ms:
            found.setdefault(sample.runner, []).append(sample.run.step_ms)
    if not found:
        return ""
    names = list(next(iter(found.values()))[0])
    lines = [f"| ms a step | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for runner, splits in found.items():
        medians = (statistics.median(split[name] for split in splits) for name in names)
        lines.append(f"| {runner} | {' | '.join(f'{median:.2f}' for median in medians)} |")
    return "\n".join(lines)


def ratio_text(found: Ratio) -> str:
    """Return a ratio with its interval as text."""
    return f"{found.overall:.2f} × ({found.low:.2f}–{found.high:.2f})"


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Return a Markdown table of our runners' decoding rates over the peers'."""
    lines = ["| task | runner | peer | ratio (95 %) |", "|---|---|---|---:|"]
    return "\n".join(lines + [f"| {c.task} | {c.runner} | {c.peer} | {ratio_text(c.ratio)} |" for c in comparisons])


def concurrency_table(concurrent: Sequence[ConcurrentRun], base: str) -> str:
    """Return a Markdown table of each method's median over turns, for each number of requests at once."""
    lines = ["| requests at once | method | tokens/s in all | turns | over {} | over fewest | requests per pass |"]
    lines = [lines[0].format(base), "|---:|---|---:|---:|---:|---:|---:|"]
    groups: dict[tuple[int, str], list[ConcurrentRun]] = {}
    for run in concurrent:
        groups.setdefault((len(run.runs), run.method), []).append(run)
    rates = {key: statistics.median(run.tokens_per_s for run in runs) for key, runs in groups.items()}
    fewest = min(number for number, _ in groups)
    for (number, name), runs in groups.items():
        mine = sorted(run.tokens_per_s for run in runs)
        over = [ratio(rates[number, name], rates[key]) for key in ((number, base), (fewest, name))]
        cells = [number, name, f"{rates[number, name]:.0f}", f"{mine[0]:.0f}–{mine[-1]:.0f}"]
        lines.append(f"| {' | '.join(map(str, [*cells, *(f'{each:.2f} ×' for each in over)]))} | {_occupancy(runs)} |")
    return "\n".join(lines)


def _occupancy(concurrent: Sequence[ConcurrentRun]) -> str:
    shared = [run.requests_per_pass or run.seen_per_pass or 0.0 for run in concurrent]
    return f"{statistics.median(shared):.1f}"


def save(
    path: Path,
    about: Mapping[str, Any],
    figures: Mapping[str, Any],
    samples: Sequence[Sample],
    concurrent: Sequence[ConcurrentRun],
) -> None:
    """Write conditions, figures and every run as JSON; a hash replaces the token ids, to compare texts."""
    concurrent_entries = [
        {
            "method": run.method,
            "num_requests": len(run.runs),
            "wall_s": run.wall_s,
            "tokens_per_s": run.tokens_per_s,
            "requests_per_pass": run.requests_per_pass,
            "seen_per_pass": run.seen_per_pass,
        }
        for run in concurrent
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"conditions": about, **figures, "crowds": concurrent_entries, "samples": [*map(_recorded, samples)]}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def save_runs(path: Path, samples: Sequence[Sample]) -> None:
    """Write every run as a line of JSON."""
    path.write_text("".join(f"{json.dumps(_recorded(sample))}\n" for sample in samples), encoding="utf-8")


def _recorded(sample: Sample) -> dict[str, Any]:
    return {**asdict(sample), "run": _without_ids(asdict(sample.run))}


def _without_ids(run: dict[str, Any]) -> dict[str, Any]:
    ids = run.pop("ids")
    digest = hashlib.sha256(str(ids).encode()).hexdigest()[:12]
    return {"num_tokens": len(ids), "text": digest, **run}
