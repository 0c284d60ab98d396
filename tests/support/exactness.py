"""Checks that a text is the target's own: compares its tokens with stock transformers, and measures differences.

docs/protocol.md, Equality. At temperature 0 the oracle is `generate` of transformers; above, it is the keyed
noise added to the stock model's log p (auditor/reference/distribution.py), position by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from auditor.equality import first_difference
from auditor.reference.distribution import log_p, sample
from auditor.reference.noise import gumbel
from auditor.settings import inputs_of
from benchmarks.stock_model import StockModel
from benchmarks.traffic import Prompt
from orchestrator.core.sampling_params import Sampling
from tests.support.client_pool import Answer, ClientPool, ask

NEAR_TIE = 1e-4
LIMIT_S = 900  # long enough for a busy machine, where a deadline would cut a text short


def _float32(value: float) -> float:
    """Return the value that an FP32 tensor carries."""
    return float(np.float32(value))


#: The samplings of `make exact`, and those of `make audit-full`; the index of the prompt is added to the seed.
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(_float32(0.8), top_p=_float32(0.95)),
}
TEMPERATURES = {
    f"{temperature}, seed {number}": Sampling(_float32(temperature), seed=1000 * number)
    for temperature in (0.7, 1.0, 1.5)
    for number in (1, 2)
}


@dataclass(frozen=True)
class Case:
    """One request: a prompt, a setting of a method, and a sampling with its seed."""

    prompt: Prompt
    setting: str
    sampling: Sampling

    def options(self, num_tokens: int) -> dict[str, Any]:
        """Return the request's inputs."""
        rule = self.sampling
        sampled = {"temperature": rule.temperature, "top_p": rule.top_p, "seed": rule.seed}
        limits = {"max_tokens": num_tokens, "timeout_ms": LIMIT_S * 1000, "limit_s": LIMIT_S}
        return inputs_of(self.setting, self.prompt.text) | ({} if rule.greedy else sampled) | limits


def cases_of(prompts: Sequence[Prompt], sampling: str, turns: Sequence[Sequence[str]]) -> list[Case]:
    """Return the cases of some settings, grouped by prompt; each prompt has its own seed.

    turns: lists of settings; each prompt gets one setting of every list, in turn.
    """
    rule = (SAMPLINGS | TEMPERATURES)[sampling]
    return [
        Case(prompt, names[index % len(names)], rule if rule.greedy else replace(rule, seed=rule.seed + 1 + index))
        for index, prompt in enumerate(prompts)
        for names in turns
    ]


def run(url: str, cases: Sequence[Case], num_tokens: int, at_once: int = 1, salt: str = "") -> list[Answer]:
    """Run the cases on a server, `at_once` of them at a time, and return their answers in order.

    salt: cases with different salts share no KV blocks.
    """

    def one(client: Any, case: Case) -> Answer:
        return ask(client, case.prompt.text, **case.options(num_tokens), cache_salt=salt or None)

    return ClientPool(url, at_once).map(one, cases)


class Oracle:
    """The stock model of transformers in this process, with its own weights, dtype and norms."""

    def __init__(self, folder: str, dtype: str) -> None:
        self._stock = StockModel(Path(folder), dtype, exact_norms=False)
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Return the prompt's ids."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def greedy(self, text: str, num_tokens: int) -> list[int]:
        """Return the output of `generate` at temperature 0."""
        return self._stock.greedy(self.encode(text), num_tokens)

    @torch.inference_mode()
    def target_tokens(self, text: str, tokens: Sequence[int], sampling: Sampling) -> list[int]:
        """Return the token that the reference picks at each position of `tokens`, given those before it.

        Invariant: equals `tokens` if and only if `auditor.reference.decoding.generate` generates them.
        """
        prompt = self.encode(text)
        output = self._stock.model(torch.tensor([[*prompt, *tokens]]), use_cache=False)
        rows = output.logits[0, len(prompt) - 1 : -1].double().numpy()
        result: list[int] = sample(rows, len(prompt) + np.arange(len(tokens)), sampling).tolist()
        return result


@dataclass(frozen=True)
class Difference:
    """The first difference of an answer from the expected one; margin: distance from a tie, recomputed in float64."""

    case: str
    position: int
    expected: int | None
    got: int | None
    margin: float

    @property
    def near_tie(self) -> bool:
        """True if rounding in float32 can explain the difference."""
        return self.margin < NEAR_TIE

    def __str__(self) -> str:
        return (
            f"{self.case}: output token {self.position} is {self.got}, expected {self.expected}, "
            f"margin {self.margin:.3g} ({'near tie' if self.near_tie else 'no tie'})"
        )


class Judge:
    """Compares outputs; a difference is examined in float64 with exact norms, by the model in `folder`."""

    def __init__(self, folder: str, encode: Callable[[str], list[int]]) -> None:
        self._folder = Path(folder)
        self._encode = encode
        self._exact: StockModel | None = None

    def compare(self, case: Case, name: str, expected: Sequence[int], got: Sequence[int]) -> Difference | None:
        """Return the first difference with its margin, or None."""
        at = first_difference(expected, got)
        if at is None:
            return None
        left, right = (ids[at] if at < len(ids) else None for ids in (expected, got))
        margin = math.inf
        if left is not None and right is not None:
            ids = [*self._encode(case.prompt.text), *expected[:at]]
            margin = self._margin(ids, left, right, case.sampling)
        return Difference(name, at, left, right, margin)

    def _margin(self, ids: list[int], left: int, right: int, sampling: Sampling) -> float:
        """Return the gap between two tokens' scores after `ids`: log p, and the noise above temperature 0."""
        self._exact = self._exact or StockModel(self._folder)
        row = self._exact.logits(ids)[None]
        if sampling.greedy:
            return float(abs(row[0, left] - row[0, right]))
        scores = log_p(row, sampling)[0] + gumbel(sampling.seed, len(ids), np.arange(row.shape[1]))
        if np.isfinite(scores[[left, right]]).all():
            return float(abs(scores[left] - scores[right]))
        return max(border_distance(row, token, sampling) for token in (left, right) if not np.isfinite(scores[token]))


def border_distance(row: np.ndarray, token: int, sampling: Sampling) -> float:
    """Return how much probability separates a token that top-p removes from being kept; row: (1, V) logits."""
    probs = np.exp(log_p(row, replace(sampling, top_p=1.0))[0])
    before = probs[probs > probs[token]].sum()
    return float(abs(before - sampling.top_p))
