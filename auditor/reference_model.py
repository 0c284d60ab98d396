"""The reference by which answers are judged: the stock model in float64 and numpy references, no served code."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from auditor.reference.decoding import decide, process_tree_logits
from auditor.reported_steps import ReportedSequence, ReportedStep
from benchmarks.stock_model import StockModel
from orchestrator.core.accept import AcceptedPath
from orchestrator.core.arrays import BoolArray, FloatArray
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.grammar import Grammars
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree

#: Served dtype → by how much rounding may move a logit; a decision that it can flip is a near tie.
NEAR_TIES = {"float64": 0.0, "float32": 1e-4, "bfloat16": 5e-2}
NUM_PERTURBATIONS = 64
#: Several checks read the logits of the same output; those of this many outputs are kept.
MAX_CACHED = 32


class Decision(NamedTuple):
    """A step decided again. accepted: the reference's decision. is_tie: rounding can turn it into the reported one."""

    accepted: AcceptedPath
    is_tie: bool


class ReferenceModel:
    """A checkpoint as transformers runs it; dtype: the served one, which sets the size of a near tie."""

    def __init__(self, folder: str, dtype: str = "float64") -> None:
        self.stock = StockModel(Path(folder))
        self.checkpoint = read_checkpoint(folder)
        self.rounding = NEAR_TIES[dtype]
        self.dtype = dtype
        self._cached: OrderedDict[tuple[int, ...], FloatArray] = OrderedDict()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self.checkpoint.tokenizer

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.checkpoint.vocab_size

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.checkpoint.tokenizer_file, self.vocab_size, self.checkpoint.eos_ids)

    def encode(self, text: str) -> list[int]:
        """Return a prompt's ids."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def logits(self, ids: Sequence[int], num_rows: int = 1) -> FloatArray:
        """Return the logits after each of the last `num_rows` of `ids`: (num_rows, V) float64, by one causal pass."""
        key = (num_rows, *ids)
        if key not in self._cached:
            self._cached[key] = self.forward(ids, num_rows)[0]
        self._cached.move_to_end(key)
        if len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return self._cached[key]

    @torch.inference_mode()
    def forward(
        self, ids: Sequence[int], num_rows: int, cache: Any = None, use_cache: bool = False
    ) -> tuple[FloatArray, Any]:
        """Run one pass of the stock model.

        cache: the stock model's cache of the tokens before `ids`. use_cache: whether to return the cache after them.
        Returns: (num_rows, V) float64 logits after the last `num_rows` of `ids`; the cache, or None.
        """
        output = self.stock.model(
            torch.tensor([list(ids)]), past_key_values=cache, use_cache=use_cache, logits_to_keep=num_rows
        )
        return output.logits[0].double().numpy(), output.past_key_values if use_cache else None

    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the output of transformers' `generate` at temperature 0."""
        return self.stock.greedy(ids, num_tokens)

    def legal(self, sampling: Sampling) -> Callable[[Sequence[int]], BoolArray] | None:
        """Return the function from an output to the tokens that the request's grammar allows next, (V,) bool."""
        if sampling.logits_options.grammar is None:
            return None
        matcher = self._grammars.matcher(sampling.logits_options.grammar, sampling.logits_options.end_ids)

        def legal(output: Sequence[int]) -> BoolArray:
            matcher.follow(output)
            return matcher.legal([])

        return legal

    def processed_logits(self, ids: Sequence[int], num_prompt: int, sampling: Sampling) -> FloatArray:
        """Return the logits after `ids`, processed as the request asks: (1, V) float64."""
        prompt, output = ids[:num_prompt], ids[num_prompt:]
        return process_tree_logits(self.logits(ids), TokenTree.bare(), prompt, output, sampling, self.legal(sampling))


class Replay:
    """One reported sequence, decided again step by step.

    One causal pass covers the emitted tokens. Every other branch of a tree has its own pass, which starts from the
    stock model's cache of the tokens before it. Sliding windows forget tokens that such a cache would need: there each
    branch is computed from the beginning.
    """

    def __init__(self, reference: ReferenceModel, reported: ReportedSequence) -> None:
        self._reference, self._reported = reference, reported
        self.ids = [*reported.prompt, *reported.tokens]
        windowed = "sliding" in str(reference.stock.model.config)
        self.rows, self._cache = reference.forward(self.ids, len(reported.tokens) + 1, use_cache=not windowed)
        self._legal = reference.legal(reported.sampling)

    def decide(self, step: ReportedStep) -> Decision:
        """Return the reference's decision on a step."""
        sampling, ids = self._reported.sampling, self.ids[: step.prefix_len]
        prompt, output = self._reported.prompt, ids[len(self._reported.prompt) :]
        rows = self._tree_rows(ids, step.tree)

        def decided(logits: FloatArray) -> AcceptedPath:
            processed = process_tree_logits(logits, step.tree, prompt, output, sampling, self._legal)
            return decide(processed, step.tree, step.q, step.prefix_len, sampling)

        accepted = decided(rows)
        is_tie = accepted != step.accepted and any(
            decided(variant) == step.accepted for variant in perturbed(rows, self._reference.rounding)
        )
        return Decision(accepted, is_tie)

    def _tree_rows(self, ids: list[int], tree: TokenTree) -> FloatArray:
        """Return the logits of the root and every node, (m + 1, V) float64, by a pass for each path to a leaf."""
        rows = np.empty((tree.num_nodes + 1, self.rows.shape[1]))
        for leaf in sorted({*range(tree.num_nodes + 1)} - set(tree.parents.tolist())):
            rows[np.flatnonzero(tree.mask[leaf])] = self._path_rows(ids, tree.paths[leaf])
        return rows

    def _path_rows(self, ids: list[int], path: tuple[int, ...]) -> FloatArray:
        branch, num_prompt = [*ids, *path], len(self._reported.prompt)
        if self.ids[: len(branch)] == branch:
            return self.rows[len(ids) - num_prompt :][: len(path) + 1]
        if self._cache is None:
            return self._reference.logits(branch, len(path) + 1)
        cache = copy.deepcopy(self._cache)
        cache.crop(len(ids) - 1 - len(self.ids))  # a negative length: how many tokens to drop from the end
        return self._reference.forward([ids[-1], *path], len(path) + 1, cache, use_cache=True)[0]


def perturbed(logits: FloatArray, size: float) -> list[FloatArray]:
    """Return NUM_PERTURBATIONS copies of the logits, each logit moved by up to `size`; no copy if `size` is 0.

    logits: (n, V) float64.
    """
    if not size:
        return []
    rng = np.random.default_rng(0)
    return [logits + rng.uniform(-size, size, logits.shape) for _ in range(NUM_PERTURBATIONS)]
