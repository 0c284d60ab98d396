"""The stock model as the judge: plain causal passes in float64, the numpy reference, and nothing of what is served."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from auditor.reported_steps import ReportedSequence, ReportedStep
from benchmarks.stock_model import StockModel
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import FloatArray
from orchestrator.deployment.checkpoint import read_checkpoint
from orchestrator.sampling.accept import AcceptedPath
from orchestrator.sampling.grammar import Grammars
from orchestrator.sampling.reference import Legal, decide, process_tree_logits

#: By how much rounding may move a logit in the served dtype: a decision that flips within it is a near tie.
NEAR_TIES = {"float64": 0.0, "float32": 1e-4, "bfloat16": 5e-2}
NUM_NUDGES = 64
#: So many outputs' logits are kept: the same text is looked at by several checks.
MAX_KNOWN = 32


class Decision(NamedTuple):
    """walk: what must come. is_tie: whether the served one comes when logits move as rounding may move them."""

    walk: AcceptedPath
    is_tie: bool


class ReferenceModel:
    """A checkpoint, read by transformers; dtype: the served one, which says what counts as a near tie."""

    def __init__(self, folder: str, dtype: str = "float64") -> None:
        self.plain = StockModel(Path(folder))
        self.checkpoint = read_checkpoint(folder)
        self.near_tie = NEAR_TIES[dtype]
        self.dtype = dtype
        self._known: OrderedDict[tuple[int, ...], FloatArray] = OrderedDict()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's."""
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

    def rows(self, ids: Sequence[int], num_rows: int = 1) -> FloatArray:
        """Return (num_rows, V) logits behind the last `num_rows` of `ids`, by one causal pass over all of them."""
        key = (num_rows, *ids)
        if key not in self._known:
            self._known[key] = self.forward(ids, num_rows)[0]
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return self._known[key]

    @torch.inference_mode()
    def forward(
        self, ids: Sequence[int], num_rows: int, cache: Any = None, use_cache: bool = False
    ) -> tuple[FloatArray, Any]:
        """Return (num_rows, V) logits, and the stock model's own cache when asked; cache: of the tokens before `ids`."""
        output = self.plain.model(
            torch.tensor([list(ids)]), past_key_values=cache, use_cache=use_cache, logits_to_keep=num_rows
        )
        return output.logits[0].double().numpy(), output.past_key_values if use_cache else None

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return what `generate` of transformers says at temperature 0."""
        given = torch.tensor([list(ids)])
        said = self.plain.model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=num_tokens
        )
        tokens: list[int] = said[0, len(ids) :].tolist()
        return tokens

    def legal(self, sampling: Sampling) -> Legal | None:
        """Return what the grammar of a request allows behind an output, None without one."""
        if sampling.logits_options.grammar is None:
            return None
        matcher = self._grammars.matcher(sampling.logits_options.grammar, sampling.logits_options.end_ids)
        return lambda output: matcher.follow(output) or matcher.legal([])

    def shaped(self, ids: Sequence[int], num_prompt: int, sampling: Sampling) -> FloatArray:
        """Return (1, V) logits behind `ids` as the request wants them."""
        prompt, output = ids[:num_prompt], ids[num_prompt:]
        return process_tree_logits(self.rows(ids), TokenTree.bare(), prompt, output, sampling, self.legal(sampling))


class Replay:
    """One told sequence, decided anew.

    One causal pass covers what was said; every branch beside it has its own, which goes on from the stock model's own
    cache of the tokens before it (and where layers have windows, which such a cache forgets, from the beginning).
    """

    def __init__(self, reference: ReferenceModel, told: ReportedSequence) -> None:
        self._reference, self._told = reference, told
        self.ids = [*told.prompt, *told.tokens]
        windowed = "sliding" in str(reference.plain.model.config)
        self.rows, self._cache = reference.forward(self.ids, len(told.tokens) + 1, use_cache=not windowed)
        self._legal = reference.legal(told.sampling)

    def decide(self, step: ReportedStep) -> Decision:
        """Return what the reference makes of a step."""
        sampling, ids = self._told.sampling, self.ids[: step.prefix_len]
        prompt, output = self._told.prompt, ids[len(self._told.prompt) :]
        rows = self._tree_rows(ids, step.tree)

        def decided(logits: FloatArray) -> AcceptedPath:
            shaped = process_tree_logits(logits, step.tree, prompt, output, sampling, self._legal)
            return decide(shaped, step.tree, step.q, step.prefix_len, sampling)

        walk = decided(rows)
        is_tie = walk != step.walk and any(
            decided(near) == step.walk for near in nudged(rows, self._reference.near_tie)
        )
        return Decision(walk, is_tie)

    def _tree_rows(self, ids: list[int], tree: TokenTree) -> FloatArray:
        """Return (m + 1, V): a pass for every path from the root to a leaf."""
        rows = np.empty((tree.num_nodes + 1, self.rows.shape[1]))
        for leaf in sorted({*range(tree.num_nodes + 1)} - set(tree.parents.tolist())):
            rows[np.flatnonzero(tree.mask[leaf])] = self._path_rows(ids, tree.paths[leaf])
        return rows

    def _path_rows(self, ids: list[int], path: tuple[int, ...]) -> FloatArray:
        line, num_prompt = [*ids, *path], len(self._told.prompt)
        if self.ids[: len(line)] == line:
            return self.rows[len(ids) - num_prompt :][: len(path) + 1]
        if self._cache is None:
            return self._reference.rows(line, len(path) + 1)
        cache = copy.deepcopy(self._cache)
        cache.crop(len(ids) - 1 - len(self.ids))  # how many to take from its end
        return self._reference.forward([ids[-1], *path], len(path) + 1, cache, use_cache=True)[0]


def nudged(rows: FloatArray, size: float) -> list[FloatArray]:
    """Return the rows with every logit moved by up to `size`, in NUM_NUDGES ways; none for a size of 0."""
    if not size:
        return []
    rng = np.random.default_rng(0)
    return [rows + rng.uniform(-size, size, rows.shape) for _ in range(NUM_NUDGES)]
