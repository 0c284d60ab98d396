"""The stages of one case of the first run; each runs in a process of its own and leaves `<stage>.json`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from build.trtllm.builder import build
from build.trtllm.plan import Plan, make_plan
from build.trtllm.render import plan_text
from build.trtllm.spec import EngineSpec
from orchestrator.core.errors import ServingError

Job = Mapping[str, str]
PROMPTS = (
    "def fibonacci(n):\n    ",
    "Repeat: one two three four five. one two three four five. one two",
    "The capital of France is",
)
NUM_TOKENS = 48
#: The least common start of two texts, as a share of the longer one, for a near tie to explain their difference.
LEAST_EQUAL = 0.25
SEQ_LEN, BATCH = 512, 4
POLL_S, STOP_LIMIT_S = 0.5, 60.0


def run_stage(stage: str, job: Job) -> int:
    """Run one stage and write what it found; the reason for a failure goes to the log."""
    try:
        found = STAGES[stage](job)
    except (ServingError, OSError) as error:
        print(f"{stage}: {error}", file=sys.stderr)
        return 1
    (Path(job["folder"]) / f"{stage}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


def _stage_heads(job: Job) -> dict[str, Any]:
    """Train the case's heads for its target, without the target's own continuations, which would take longer."""
    command = [sys.executable, "-m", "build.heads", "--target", job["target"], "--heads", job["case"]]
    command += ["--out", str(_trained(job).parent), "--device", job["device"]]
    command += ["--corpus", job["heads_corpus"], "--tokens", job["heads_tokens"], "--own-tokens", "0"]
    if status := subprocess.run(command, check=False).returncode:
        raise OSError(f"python -m build.heads ended with exit status {status}")
    return {"tokens": int(job["heads_tokens"])}


def _trained(job: Job) -> Path:
    """Return the folder of heads that the stage `heads` trains."""
    return Path(job["folder"]) / "heads" / job["case"]


def _plan(job: Job) -> Plan:
    """Return the plan of the smallest engines of a case."""
    is_tree = job["case"] in ("medusa", "eagle", "eagle2")
    spec = EngineSpec(
        target=job["target"],
        drafter=job["drafter"] or (str(_trained(job)) if _trained(job).is_dir() else ""),
        method=job["case"],
        gpu=job["gpu"],
        max_batch_size=BATCH,
        max_seq_len=SEQ_LEN,
        draft_len=0 if is_tree or job["case"] in ("none", "lookahead", "redrafter") else 4,
        examples_dir=job["examples"],
    )
    return make_plan(spec)


def _stage_plan(job: Job) -> dict[str, Any]:
    print(plan_text(_plan(job)))
    return {}


def _stage_build(job: Job) -> dict[str, Any]:
    began = time.monotonic()
    build(_plan(job), Path(job["folder"]) / "build")
    return {"minutes": round((time.monotonic() - began) / 60, 1)}


def _stage_torch(job: Job) -> dict[str, Any]:
    """Generate with the torch engine on the checkpoint that the engine was made from."""
    source = Path(job["folder"]) / "build/sources/target"
    target = source if source.is_dir() else Path(job["target"])
    lines = [f'target = "{target}"', f'device = "{job["device"]}"', 'dtype = "float32"']
    return _generate(job, "torch", lines, "none", "")


def _stage_engine(job: Job) -> dict[str, Any]:
    """Generate with the engine and its method."""
    engines = Path(job["folder"]) / "build/engines"
    lines = [f'target = "{engines / "target"}"', 'engine = "tensorrt_llm"', f'default_speculation = "{job["case"]}"']
    if (engines / "draft").is_dir():
        lines.append(f'draft = "{engines / "draft"}"')
    return _generate(job, "engine", lines, job["case"], job["repository"])


def _generate(job: Job, name: str, lines: list[str], method: str, repository: str) -> dict[str, Any]:
    """Serve a deployment, generate every prompt, and write the texts beside the figures."""
    config = Path(job["folder"]) / f"{name}.toml"
    config.write_text("\n".join([*lines, "request_timeout_ms = 120000"]) + "\n", encoding="utf-8")
    with _serving(config, repository) as url:
        _ask(url, PROMPTS[0], method)  # warm-up: the first request pays for work that is done once
        began = time.monotonic()
        answers = [_ask(url, prompt, method) for prompt in PROMPTS]
        seconds = time.monotonic() - began
    (Path(job["folder"]) / f"{name}-texts.json").write_text(json.dumps([answer["text_output"] for answer in answers]))
    figures = {"tokens_per_s": round(sum(int(a["num_output_tokens"]) for a in answers) / seconds, 1)}
    for key in ("total_accepted_draft_tokens", "total_draft_tokens", "num_steps"):
        figures[key] = sum(int(answer.get(key, 0)) for answer in answers)
    return figures


@contextmanager
def _serving(config: Path, repository: str) -> Iterator[str]:
    """Run the launcher over a deployment and yield its HTTP address; raises OSError when it does not become ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, ports = f"http://127.0.0.1:{port}", {f"SPECSERVE_{name}_PORT": "0" for name in ("GRPC", "METRICS", "HEALTH")}
    command = [sys.executable, "-m", "launcher", str(config)]
    command += ["--model-repository", repository] if repository else []
    environ = {**os.environ, **ports, "SPECSERVE_HTTP_PORT": str(port), "SPECSERVE_READY_LIMIT_S": "1800"}
    process = subprocess.Popen(command, env=environ)
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise OSError(f"the server ended with exit status {process.returncode} before it was ready")
            time.sleep(POLL_S)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_LIMIT_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _ask(url: str, prompt: str, method: str) -> dict[str, Any]:
    """Return the answer of /generate to one greedy request; raises OSError when the server does not give one."""
    body = {"text_input": prompt, "max_tokens": NUM_TOKENS, "speculation": method, "temperature": 0.0}
    body |= {"return_num_output_tokens": True, "return_stats": True}
    endpoint = f"{url}/v2/models/speculative/generate"
    request = urllib.request.Request(endpoint, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=150) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:  # its body has the reason
        raise OSError(f"{error}: {error.read().decode(errors='replace')}") from None
    if "error" in answer:
        raise OSError(str(answer["error"]))
    return answer


def _stage_compare(job: Job) -> dict[str, Any]:
    """Compare both texts; different number formats may diverge at a near tie, but not at the first tokens."""
    folder = Path(job["folder"])
    ours, theirs = (json.loads((folder / f"{name}-texts.json").read_text()) for name in ("torch", "engine"))
    equal = [_common(a, b) for a, b in zip(ours, theirs, strict=True)]
    if min(equal) < LEAST_EQUAL:
        at = equal.index(min(equal))
        raise OSError(f"the text differs from the torch engine's: {theirs[at]!r} instead of {ours[at]!r}")
    return {"equal_texts": sum(share == 1.0 for share in equal), "of": len(equal), "least_equal": round(min(equal), 2)}


def _common(a: str, b: str) -> float:
    """Return the length of the common start of two texts as a share of the longer; 1.0 = they are equal."""
    longest = max(len(a), len(b))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / longest if longest else 1.0


STAGES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "heads": _stage_heads,
    "plan": _stage_plan,
    "build": _stage_build,
    "torch": _stage_torch,
    "engine": _stage_engine,
    "compare": _stage_compare,
}
