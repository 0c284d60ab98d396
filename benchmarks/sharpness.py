"""`python -m benchmarks.sharpness`: tokens per step of `eagle2` and `redrafter` by the sharpness of their ranking.

The heads draft along the demo target's greedy texts in this process, with the methods' defaults at 8 nodes. Prints a
line for the prompts of docs/figures/heads.json and one for as many others, with 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.deployment import ROOT, TASKS
from benchmarks.stock_model import StockModel
from benchmarks.traffic import read_prompts
from orchestrator.core.context import Context
from orchestrator.core.errors import ServingError
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse, FloatArray, HeadInput
from orchestrator.deployment.checkpoint import read_checkpoint
from orchestrator.wire.context import delta_of
from orchestrator.wire.drafter import DraftRequest
from runtime.engine.calls import EngineCall
from runtime.heads.checkpoint.load import load_head
from runtime.heads.engines.eagle import EagleEngine
from runtime.heads.engines.redrafter import RedrafterEngine

TARGET = str(ROOT / "models/target")
REPORTED, OTHERS = slice(0, 4), slice(4, 8)
NUM_TOKENS, MAX_NODES = 96, 8
#: By the monotonic clock: finite, because the engine divides the time that is left.
NO_DEADLINE_S = 1e12


class Text(NamedTuple):
    """A prompt and its greedy output.

    states: (n − 1, d) float32, the target's hidden states after its final norm, at every position but the last.
    """

    prompt_len: int
    ids: list[int]
    states: FloatArray


def texts(which: slice) -> Iterator[Text]:
    """Generate the target's greedy texts after some prompts of each task."""
    encode = read_checkpoint(TARGET).tokenizer.encode
    model = StockModel(Path(TARGET), "float32").model
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


def steps_along(engine: Any, text: Text, keeps: bool, width: int, max_depth: int, sharpness: float) -> int:
    """Return the steps that a head needs for a text; the first step yields one token without drafts.

    keeps: whether the head has a KV cache and is sent only the rows that it lacks.
    width, max_depth: of the head's trees, which grow by confidences of this sharpness.
    """
    length, num_steps, sent, start = text.prompt_len + 1, 1, 0, 0
    while length < len(text.ids):
        start = start if keeps else length - 2
        rows = text.states[start : length - 1]
        head = HeadInput(rows.astype(np.float32), start, TokenTree.bare(), width, sharpness=sharpness)
        delta = delta_of(Context(text.ids[:length]), sent if keeps else 0, 1, "")
        answer = draft(engine, DraftRequest(delta, Sampling(), MAX_NODES, max_depth, head))
        if keeps:
            sent, start = length, answer.cached_len
        length += 1 + num_accepted(set(answer.tree.paths[1:]), text.ids[length:])
        num_steps += 1
    return num_steps


def draft(engine: Any, request: DraftRequest) -> DraftResponse:
    """Return an engine's answer to one call."""
    answers: list[Any] = []
    engine.advance([EngineCall(request, NO_DEADLINE_S, answers.append)])
    response: DraftResponse | ServingError
    (response,) = answers
    if isinstance(response, ServingError):
        raise response
    return response


def num_accepted(paths: set[tuple[int, ...]], following: list[int]) -> int:
    """Return how many of the following tokens lie on one path of a tree."""
    return next((n for n in range(len(following)) if tuple(following[: n + 1]) not in paths), len(following))


def summary(pairs: FloatArray) -> str:
    """Return tokens per step with its interval as text.

    pairs: (prompts, 2) int64, tokens and steps of each prompt.
    """
    drawn = np.random.default_rng(0).integers(len(pairs), size=(10_000, len(pairs)))
    tokens, steps = pairs[drawn].sum(axis=1).T
    low, high = np.percentile(tokens / steps, (2.5, 97.5))
    return f"{pairs[:, 0].sum() / pairs[:, 1].sum():.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sharpness", nargs="*", type=float, default=[1.0, 0.5, 0.3, 0.25])
    options = parser.parse_args()
    folders, cpu = {kind: str(ROOT / "models" / kind) for kind in ("eagle", "redrafter")}, torch.device("cpu")
    eagle, redrafter = (load_head(kind, folder, TARGET, torch.float32, cpu) for kind, folder in folders.items())
    groups = {"reported": list(texts(REPORTED)), "others": list(texts(OTHERS))}
    for sharpness in options.sharpness:
        for name, some in groups.items():
            rows = [
                (
                    steps_along(EagleEngine(eagle, 64, 16), text, True, 6, 7, sharpness),
                    steps_along(RedrafterEngine(redrafter), text, False, 5, 5, sharpness),
                )
                for text in some
            ]
            for place, method in enumerate(("eagle2", "redrafter")):
                pairs = np.array([(NUM_TOKENS, row[place]) for row in rows])
                print(f"sharpness {sharpness:g}, {name}: {method} {summary(pairs)}", flush=True)


if __name__ == "__main__":
    main()
