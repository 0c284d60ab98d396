"""`python -m benchmarks.gpu_check` (make gpu-check): what a machine with a GPU shows of this server, in ten minutes.

Each part is a process of its own with a limit, so that one that hangs or dies ends alone. The report is a page and a
JSON file, to be sent back as they are. With --device cpu the same parts run without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestrator.core.context import Context
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from runtime.engine.build_engines import build_target
from runtime.engine.calls import submit_and_wait

ROOT = Path(__file__).resolve().parent.parent
#: Part → seconds; ten minutes in all.
LIMITS_S = {"imports": 60, "exactness": 180, "rows": 120, "speed": 240}
ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT = list(range(5, 69))
PACKAGES = ("torch", "transformers", "numpy", "llguidance", "nvidia-pytriton")
_LOG_LINES = 15


def imports(options: argparse.Namespace) -> dict[str, Any]:
    """Return the versions of what serves, and the GPU; raises if the device cannot compute."""
    import torch

    found: dict[str, Any] = {name: version(name) for name in PACKAGES}
    if options.device.startswith("cuda"):
        device = torch.cuda.get_device_properties(options.device)
        found |= {"gpu": device.name, "memory_gib": round(device.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    one = torch.ones(64, 64, device=options.device)
    assert float((one @ one).sum()) == 64.0**3
    return found


def exactness(options: argparse.Namespace) -> dict[str, Any]:
    """Compare greedy texts in float32: the device's torch engine and the CPU's default one; near ties may differ."""
    theirs = _greedy(ServingConfig(target=options.target, device=options.device, kernels="torch"), options.tokens)
    ours = _greedy(ServingConfig(target=options.target), options.tokens)
    pairs = zip(ours, theirs, strict=True)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(ours))
    return {"num_tokens": len(ours), "num_equal": same, "equal": same == len(ours)}


def rows(options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a pass by its rows, the least of several, and the memory that was taken."""
    import torch

    on_gpu = options.device.startswith("cuda")
    config = ServingConfig(target=options.target, device=options.device, kernels="torch")
    config = config.model_copy(update={"dtype": "bfloat16"}) if on_gpu else config
    client, _ = build_target(config)
    try:
        found = {str(num): min(_step(client, num, turn).forward_us for turn in range(5)) / 1000 for num in ROWS}
    finally:
        client.close()
    peak = {"memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if on_gpu else {}
    return {"dtype": config.dtype, "ms": found, **peak}


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the benchmark measures through the real server, plain and with `auto`."""
    with tempfile.TemporaryDirectory() as folder:
        config, result = Path(folder, "serving.toml"), Path(folder, "speed.json")
        config.write_text(f'target = "{options.target}"\ndevice = "{options.device}"\n', encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks", "--config", str(config), "--methods", "none", "auto"]
        command += ["--tasks", "completion", "--num-prompts", "2", "--turns", "1", "--max-tokens", str(options.tokens)]
        subprocess.run([*command, "--json", str(result)], cwd=ROOT, check=True)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "imports": imports,
    "exactness": exactness,
    "rows": rows,
    "speed": speed,
}


def _greedy(config: ServingConfig, num_tokens: int) -> list[int]:
    client, _ = build_target(config)
    context = Context(PROMPT)
    try:
        for _ in range(num_tokens):
            delta = delta_of(context, 0, 1, "")
            request = StepRequest(delta, TokenTree.bare(), Sampling(), StepOptions(), 60_000)
            answer = submit_and_wait(client.submit, request)
            assert isinstance(answer, Acceptance)
            context.commit([answer.next_token])
    finally:
        client.close()
    return list(context.output)


def _step(client: Any, num_rows: int, turn: int) -> Acceptance:
    """Run a step of so many rows, after one that has computed the prompt."""
    delta, answer = delta_of(Context(PROMPT), 0, 100 * num_rows + turn, ""), None
    for tree in (TokenTree.bare(), TokenTree.chain(PROMPT[: num_rows - 1])):
        answer = submit_and_wait(client.submit, StepRequest(delta, tree, Sampling(), StepOptions(), 60_000))
    client.release(delta.sequence_id)
    assert isinstance(answer, Acceptance)
    return answer


def run_part(name: str, arguments: Sequence[str], out: Path) -> dict[str, Any]:
    """Run one part in a process; return how it ended, how long it took, and what it found."""
    log, result, began = out / f"{name}.log", out / f"{name}.json", time.monotonic()
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments, "--part", name]
    with log.open("wb") as output:
        try:
            ended = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=LIMITS_S[name], check=False)
            status = "ok" if ended.returncode == 0 and result.is_file() else "failed"
        except subprocess.TimeoutExpired:
            status = f"over {LIMITS_S[name]} s"
    outcome: dict[str, Any] = {"part": name, "status": status, "seconds": round(time.monotonic() - began, 1)}
    if status == "ok":
        return outcome | {"found": json.loads(result.read_text(encoding="utf-8"))}
    return outcome | {"log": log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]}


def page(outcomes: Sequence[dict[str, Any]]) -> str:
    """Return the report as Markdown."""
    lines = ["# GPU check", "", "| part | status | s |", "|---|---|---:|"]
    lines += [f"| {each['part']} | {each['status']} | {each['seconds']} |" for each in outcomes]
    for each in outcomes:
        shown = json.dumps(each["found"], indent=1) if "found" in each else "\n".join(each["log"])
        lines += ["", f"## {each['part']}", "", "```text", shown, "```"]
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    made.add_argument("--target", default=str(ROOT / "models/target"), help="checkpoint (the demo's)")
    made.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (%(default)s)")
    made.add_argument("--tokens", type=int, default=64, help="tokens of a text (%(default)s)")
    made.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the report (%(default)s)")
    made.add_argument("--part", choices=PARTS, help="run this part alone, in this process")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 0 if each is ok."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if options.part:
        (out / f"{options.part}.json").write_text(json.dumps(PARTS[options.part](options)), encoding="utf-8")
        return 0
    passed = ["--target", options.target, "--device", options.device, "--tokens", str(options.tokens)]
    outcomes = []
    for name in PARTS:
        outcomes.append(run_part(name, [*passed, "--out", str(out)], out))
        print(f"{name}: {outcomes[-1]['status']}, {outcomes[-1]['seconds']} s", flush=True)
        (out / "report.json").write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
        (out / "report.md").write_text(page(outcomes), encoding="utf-8")
    print(out / "report.md")
    return int(any(each["status"] != "ok" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
