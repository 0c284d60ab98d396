"""`make demo`: the server with each drafting method generates the same text, faster than without drafts.

It starts the server with the launcher and is a client of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
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
from clients.generate import ONE_LINE, Generation, Painter, compare, generate, ratio

ROOT = Path(__file__).resolve().parent.parent
METHODS = (
    "none", "auto", "prompt_lookup", "suffix", "ngram", "lookahead", "jacobi", "recycling", "draft_model",
    "medusa", "eagle", "eagle2", "eagle3", "redrafter", "prompt_lookup+eagle2",
)  # fmt: skip
#: The drafters of the methods that need one.
DRAFTERS = {
    "draft_model": "draft", "medusa": "medusa", "eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle3",
    "redrafter": "redrafter",
}  # fmt: skip
# This method drafts from the text that the client expects; the demo knows it only for edits.
PREDICTED, PREDICTABLE = "predicted", "edit"
TASKS = ("completion", "edit", "docstring")
NEAR_TIE = 1e-4
MAX_TOKENS = 96
NUM_SPEED_PROMPTS = 2


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


Texts = dict[tuple[str, str], Generation]


def show_texts(client: Any, prompts: Sequence[Prompt], methods: Sequence[str]) -> Texts:
    """Stream each prompt with each method; return the generations by method and prompt id."""
    paint, found = Painter(sys.stdout), {}
    print("Plain text was generated token by token. Each coloured stretch is one step that accepted drafts.")
    for prompt in prompts:
        print(heading(f"{prompt.task} ({prompt.id})"), dim("\n".join(prompt.text.splitlines()[-4:])), sep="\n")
        for method in (*methods, PREDICTED) if prompt.task == PREDICTABLE else methods:
            found[method, prompt.id] = show_text(client, prompt, method, paint)
    return found


def show_text(client: Any, prompt: Prompt, method: str, paint: Painter) -> Generation:
    """Stream one prompt with one method, from a cold cache."""
    print(bold(f"── {method} "))
    inputs = {"speculation": method, "max_tokens": MAX_TOKENS, "cache_salt": f"show-{method}"}
    if method == PREDICTED:
        inputs["draft_text"] = prompt.prediction
    done = generate(client, prompt.text, paint, **inputs)
    print(f"\n{dim(ONE_LINE.format(**done.numbers()))}", flush=True)
    return done


def report_same_text(checkpoint: str, prompts: Sequence[Prompt], texts: Texts) -> bool:
    """Print which texts equal that of plain decoding; return False if one differs by more than a near tie."""
    print(heading("Is the text the same? (float32, each method compared with none, token by token)"))
    row, all_fine = "{:<22}" + "{:>34}" * len(prompts), True
    print(row.format("method", *(prompt.id for prompt in prompts)))
    for method in dict.fromkeys(name for name, _ in texts if name != METHODS[0]):
        cells = []
        for prompt in prompts:
            plain, other = (texts.get((name, prompt.id)) for name in (METHODS[0], method))
            apart = margin(checkpoint, prompt.text, plain.ids, other.ids) if plain and other else None
            cells.append(cell(apart) if other else "–")
            all_fine &= apart is None or apart < NEAR_TIE
        print(row.format(method, *cells))
    return all_fine


def cell(apart: float | None) -> str:
    """Return the cell of the first table for the logit margin at the first difference, None if there is none."""
    if apart is None:
        return "yes"
    return f"near tie ({apart:.0e} in float64)" if apart < NEAR_TIE else f"NO (margin {apart:.2g})"


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


def show_speed(client: Any, folder: Path, dtype: str, methods: Sequence[str]) -> None:
    """Print the second table: `generate.py --compare` over several prompts per task."""
    row = "{:<12}{:<22}{:>10}{:>14}{:>20}{:>12}"
    print(heading(f"Is it faster? ({dtype}; {NUM_SPEED_PROMPTS} prompts per task, cold caches, methods in turn)"))
    print(row.format("task", "method", "tokens/s", "first token", "acceptance length", "speed-up"))
    warm_ups = 1  # only for the first prompt: afterwards the server is warm
    for task in TASKS:
        runs = []
        for prompt in load_prompts(folder, task)[:NUM_SPEED_PROMPTS]:
            runs.append(compare(client, prompt.text, methods, 1, warm_ups, max_tokens=MAX_TOKENS))
            warm_ups = 0
        by_method = [[run.numbers() for per_prompt in runs for run in per_prompt[i]] for i in range(len(methods))]
        plain = pooled(by_method[0])["tokens_per_s"]
        for method, numbers in zip(methods, by_method, strict=True):
            all_of = pooled(numbers)
            rate, first_s, length = all_of["tokens_per_s"], all_of["first_token_s"], all_of["acceptance_length"]
            cells = f"{rate:.0f}", f"{first_s:.3f} s", f"{length:.2f}", f"{ratio(rate, plain):.2f} ×"
            print(row.format(task, method, *cells), flush=True)


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
    prompts = [load_prompts(folder, task)[0] for task in TASKS]
    with serving(config, "float32") as (client, methods):
        texts = show_texts(client, prompts, methods)
        same = report_same_text(checkpoint, prompts, texts)
        if same and dtype == "float32":
            show_speed(client, folder, dtype, methods)
    if same and dtype != "float32":
        with serving(config, dtype) as (client, methods):
            show_speed(client, folder, dtype, methods)
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
