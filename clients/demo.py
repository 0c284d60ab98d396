"""`make demo`: the server with each drafting method generates the same text, faster than without drafts.

It starts the server with the launcher and is a client of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import launcher
from clients.generate import ONE_LINE, Generation, Painter, generate, ratio

ROOT = Path(__file__).resolve().parent.parent
METHODS = (
    "none", "auto", "prompt_lookup", "suffix", "ngram", "lookahead", "jacobi", "recycling", "draft_model",
    "medusa", "eagle", "eagle2", "eagle3", "redrafter", "prompt_lookup+eagle2", "predicted",
)  # fmt: skip
#: The drafters of the methods that need one.
DRAFTERS = {
    "draft_model": "draft", "medusa": "medusa", "eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle3",
    "redrafter": "redrafter",
}  # fmt: skip
PLAIN, DEFAULT = METHODS[:2]
#: This method drafts from the text that the client expects, which the demo knows only for edits.
PREDICTED = "predicted"
TASKS = ("completion", "edit", "docstring")
NEAR_TIE = 1e-4
MAX_TOKENS = 96
NUM_PROMPTS = 3  # per task
ROW = "{:<22}{:>22}{:>10}{:>10}{:>19}{:>13}"


@dataclass(frozen=True)
class Prompt:
    """A held-out text to continue."""

    id: str
    task: str
    text: str

    @property
    def prediction(self) -> str:
        """The rest of an edit as an unchanged copy; "" for other prompts."""
        original, announced, copy = self.text.partition("\n\n\n# the same with ")
        return "\n" + "\n".join(original.split("\n")[copy.count("\n") :]) if announced else ""


def load_prompts(folder: Path, task: str) -> list[Prompt]:
    """Return a task's held-out prompts."""
    lines = (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(found["id"], task, found["text"]) for found in map(json.loads, lines)]


@contextlib.contextmanager
def serving(config: Path, dtype: str) -> Iterator[tuple[Any, list[str]]]:
    """Start the server in `dtype` on free ports; yield a client and the server's methods."""
    print(heading(f"Starting Triton Inference Server, {dtype}"), flush=True)
    with (
        launcher.Server(config, env={"SERVING_DTYPE": dtype}) as server,
        grpcclient.InferenceServerClient(server.grpc_url) as client,
    ):
        print(
            f"ready after {server.started_in_s:.1f} s on {server.grpc_url}: {', '.join(['target', *server.drafters])}"
        )
        yield client, methods_of(server.drafters)


def methods_of(drafters: Sequence[str]) -> list[str]:
    """Return the methods that a server with these drafters has."""
    return [method for method in METHODS if {DRAFTERS.get(name, "") for name in method.split("+")} <= {"", *drafters}]


def show_texts(client: Any, prompts: Sequence[Prompt]) -> None:
    """Stream each prompt without drafts and with the default method."""
    paint = Painter(sys.stdout)
    print("Plain text was generated token by token. Each coloured stretch is one step that accepted drafts.")
    for prompt in prompts:
        print(heading(f"{prompt.task} ({prompt.id})"), dim("\n".join(prompt.text.splitlines()[-4:])), sep="\n")
        for method in (PLAIN, DEFAULT):
            print(bold(f"── {method} "))
            done = generate(client, prompt.text, paint, speculation=method, max_tokens=MAX_TOKENS, cache_salt=method)
            print(f"\n{dim(ONE_LINE.format(**done.numbers()))}", flush=True)


#: By method and prompt.
Runs = dict[tuple[str, Prompt], Generation]


def run_all(client: Any, prompts: Sequence[Prompt], methods: Sequence[str]) -> Runs:
    """Continue each prompt with each method in turn, each time from a cold cache; the first one also as a warm-up."""
    found: Runs = {}
    for prompt in (prompts[0], *prompts):
        for method in methods:
            if method != PREDICTED or prompt.prediction:
                expected = prompt.prediction if method == PREDICTED else None
                inputs: dict[str, Any] = {"speculation": method, "draft_text": expected, "max_tokens": MAX_TOKENS}
                found[method, prompt] = generate(client, prompt.text, cache_salt=secrets.token_hex(8), **inputs)
    return found


def report(checkpoint: str, texts: Runs, timed: Runs) -> bool:
    """Print a line for each method; return False if a text differs from plain decoding's by more than a near tie.

    texts: runs whose texts are compared. timed: runs whose speed is shown.
    """
    print(ROW.format("method", "same text", "tokens/s", "speed-up", "acceptance length", "first token"))
    all_fine = True
    for method in dict.fromkeys(name for name, _ in texts):
        prompts = [prompt for name, prompt in texts if name == method]
        apart = [
            margin(checkpoint, prompt.text, texts[PLAIN, prompt].ids, texts[method, prompt].ids) for prompt in prompts
        ]
        all_fine &= all(each is None or each < NEAR_TIE for each in apart)
        own, plain = (pooled([timed[name, prompt].numbers() for prompt in prompts]) for name in (method, PLAIN))
        rate, speed_up = own["tokens_per_s"], ratio(own["tokens_per_s"], plain["tokens_per_s"])
        length, first_s = own["acceptance_length"], own["first_token_s"]
        cells = f"{rate:.0f}", f"{speed_up:.2f} ×", f"{length:.2f}", f"{first_s:.3f} s"
        print(ROW.format(method, same_text(apart), *cells))
    return all_fine


def same_text(apart: Sequence[float | None]) -> str:
    """Return how many texts are equal or near ties.

    apart: the margin of each text at its first difference; None if there is no difference.
    """
    num_ties = sum(margin is not None and margin < NEAR_TIE for margin in apart)
    count = f"{apart.count(None)}/{len(apart)}"
    if apart.count(None) + num_ties < len(apart):
        return f"{count} NO"
    return f"{count} ({num_ties} near ties)" if num_ties else count


def margin(checkpoint: str, text: str, plain: Sequence[int], other: Sequence[int]) -> float | None:
    """Return the distance of the target's float64 logits of the first two tokens that differ, None if none differ.

    It is infinite if one output is the beginning of the other, since no near tie ends a text.
    """
    if plain == other:
        return None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return math.inf
    prompt = AutoTokenizer.from_pretrained(checkpoint)(text).input_ids
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *plain[:at]]])).logits[0, -1]
    return abs(float(logits[plain[at]] - logits[other[at]]))


def pooled(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the rates of several requests together, as ratios of totals, and the mean time of the first token."""
    total = {name: sum(run[name] for run in runs) for name in ("num_tokens", "num_steps", "decode_tokens", "decode_s")}
    return {
        "tokens_per_s": ratio(total["decode_tokens"], total["decode_s"]),
        "first_token_s": ratio(sum(run["first_token_s"] for run in runs), len(runs)),
        "acceptance_length": ratio(total["num_tokens"], total["num_steps"]),
    }


def heading(text: str) -> str:
    """Return the title of a part of the demo."""
    return "\n" + bold(f"━━ {text} ")


def bold(text: str) -> str:
    """Return the text in bold if the terminal shows colours."""
    return f"\x1b[1m{text}\x1b[0m" if Painter(sys.stdout).colours else text


def dim(text: str) -> str:
    """Return the text dimmed if the terminal shows colours."""
    return f"\x1b[2m{text}\x1b[0m" if Painter(sys.stdout).colours else text


def demo(config: Path, folder: Path) -> int:
    """Run the demo; return its exit status."""
    keys = tomllib.loads(config.read_text(encoding="utf-8"))
    dtype = os.environ.get("SERVING_DTYPE") or keys.get("dtype", "float32")
    target = os.environ.get("SERVING_TARGET") or keys["target"]
    checkpoint = str(config.parent / target) if (config.parent / target).exists() else target
    prompts = [prompt for task in TASKS for prompt in load_prompts(folder, task)[:NUM_PROMPTS]]
    first = {prompt.task: prompt for prompt in reversed(prompts)}
    with serving(config, "float32") as (client, methods):
        show_texts(client, [first[task] for task in TASKS])
        texts = timed = run_all(client, prompts, methods)
    if dtype != "float32":
        with serving(config, dtype) as (client, methods):
            timed = run_all(client, prompts, methods)
    compared = "" if dtype == "float32" else ", texts compared in float32"
    print(heading("Is the text the same, and is it faster?"))
    print(f"{len(prompts)} prompts of {MAX_TOKENS} tokens, {dtype}{compared}; methods in turn, each from a cold cache.")
    same = report(checkpoint, texts, timed)
    if not same:
        print("error: a text differs from that of plain decoding by more than a near tie", file=sys.stderr)
    return 0 if same else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a text differs or the server fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "serving.toml", help="the deployment (%(default)s)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "tests/data/prompts", help="folder of held-out prompts")
    args = parser.parse_args(arguments)
    began_s = time.monotonic()
    try:
        status = demo(args.config.absolute(), args.prompts)
    except KeyboardInterrupt:
        return 130
    except (launcher.ServingError, InferenceServerException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(dim(f"\nThe demo took {time.monotonic() - began_s:.0f} s."))
    print(f"Next: {bold('make gateway')}, then open http://127.0.0.1:9000/ for the playground (OpenAI's API: /v1).")
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # stops the server on the way out


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
