"""`python -m benchmarks.sharpness`: tokens a step of `eagle2` and `redrafter` by how their confidence is sharpened.

The heads draft along the demo target's own greedy texts in this process, with the methods' defaults at 8 nodes. Printed
for the prompts of docs/figures/heads.json and for as many others, with 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from orchestrator.core.sampling_params import Sampling
from orchestrator.deployment.checkpoint import read_checkpoint
from runtime.heads.engines import ranking
from runtime.heads.engines.eagle import EagleEngine
from runtime.heads.engines.redrafter import RedrafterEngine
from tests.support.heads import draft, load, paths_of, request
from tests.support.traffic import read_prompts

ROOT = Path(__file__).resolve().parents[1]
TARGET = str(ROOT / "models/target")
TASKS = ("completion", "edit", "repetitive", "docstring")
REPORTED, OTHERS = slice(0, 4), slice(4, 8)
NUM_TOKENS, MAX_NODES = 96, 8


class Text(NamedTuple):
    """ids: prompt and output. states: the target's after its final norm, one row a position but the last."""

    prompt_len: int
    ids: list[int]
    states: np.ndarray


def texts(which: slice) -> Iterator[Text]:
    """Generate the target's greedy texts after some prompts of each task."""
    encode = read_checkpoint(TARGET).tokenizer.encode
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for prompt in (prompt for task in TASKS for prompt in read_prompts()[task][which]):
        yield greedy_text(model, encode(prompt.text).ids)


@torch.inference_mode()
def greedy_text(model: Any, prompt: list[int]) -> Text:
    """Generate one text."""
    ids, newest, cache, states = list(prompt), prompt, None, []
    for _ in range(NUM_TOKENS):
        output = model.get_decoder()(input_ids=torch.tensor([newest]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        states.append(output.last_hidden_state[0])
        newest = [int(model.lm_head(states[-1][-1]).argmax())]
        ids += newest
    return Text(len(prompt), ids, torch.cat(states).numpy())


def steps_along(engine: Any, text: Text, keeps: bool, **shape: Any) -> int:
    """Return the steps in which a head gets through a text; the first makes one token, undrafted.

    keeps: the head has a cache, and is sent what it lacks.
    """
    length, num_steps, sent, start = text.prompt_len + 1, 1, 0, 0
    while length < len(text.ids):
        start = start if keeps else length - 2
        rows = text.states[start : length - 1]
        options = {"sampling": Sampling(), "max_nodes": MAX_NODES, **shape}
        call = request(text.ids[:length], rows, start=start, sent=sent if keeps else 0, **options)
        (answer,) = draft(engine, call)
        if keeps:
            sent, start = length, answer.cached_len
        length += 1 + num_accepted(set(paths_of(answer)), text.ids[length:])
        num_steps += 1
    return num_steps


def num_accepted(paths: set[tuple[int, ...]], following: list[int]) -> int:
    """Return how many of the tokens that follow a tree's paths foretell."""
    return next((n for n in range(len(following)) if tuple(following[: n + 1]) not in paths), len(following))


def summary(pairs: np.ndarray) -> str:
    """Return tokens a step and its interval; pairs: (prompts, 2), tokens and steps."""
    drawn = np.random.default_rng(0).integers(len(pairs), size=(10_000, len(pairs)))
    tokens, steps = pairs[drawn].sum(axis=1).T
    low, high = np.percentile(tokens / steps, (2.5, 97.5))
    return f"{pairs[:, 0].sum() / pairs[:, 1].sum():.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sharpness", nargs="*", type=float, default=[1.0, 0.5, 0.3, 0.25])
    options = parser.parse_args()
    eagle, redrafter = (load(kind, ROOT / "models" / kind, TARGET, torch.float32) for kind in ("eagle", "redrafter"))
    groups = {"reported": list(texts(REPORTED)), "others": list(texts(OTHERS))}
    for ranking.SHARPNESS in options.sharpness:
        for name, some in groups.items():
            rows = [
                (
                    steps_along(EagleEngine(eagle, 64, 16), text, keeps=True, width=6, max_depth=7),
                    steps_along(RedrafterEngine(redrafter), text, keeps=False, width=5, max_depth=5),
                )
                for text in some
            ]
            for place, method in enumerate(("eagle2", "redrafter")):
                pairs = np.array([(NUM_TOKENS, row[place]) for row in rows])
                print(f"sharpness {ranking.SHARPNESS:g}, {name}: {method} {summary(pairs)}", flush=True)


if __name__ == "__main__":
    main()
