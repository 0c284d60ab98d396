"""A Target without a network: its logits come from a table over the last tokens, or from a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from auditor.reference.decoding import decide, process_tree_logits
from auditor.reference.distribution import log_softmax, sample
from auditor.reference.noise import uniform
from orchestrator.core.arrays import FloatArray, IdArray
from orchestrator.core.context import Context
from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, StepOptions


@dataclass
class TableTarget:
    """A random but fixed language over a small vocabulary.

    vocab_size: V. order: how many last tokens determine the next distribution.
    script: {ids of a prefix: the token that is all but certain after it}.
    """

    vocab_size: int = 8
    order: int = 2
    table_seed: int = 0
    sharpness: float = 2.0
    script: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    num_steps: int = 0
    released: bool = False

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """Return (V,) float64 logits of the token after `ids`."""
        if tuple(ids) in self.script:
            return np.where(np.arange(self.vocab_size) == self.script[tuple(ids)], 50.0, 0.0)
        row = 0
        for token in ids[-self.order :]:
            row = row * (self.vocab_size + 1) + token + 1
        u = uniform(self.table_seed, row % 2**32, np.arange(self.vocab_size), Stream.DRAFT)
        return self.sharpness * np.log(u / (1 - u))

    def step(
        self,
        context: Context,
        tree: TokenTree,
        sampling: Sampling,
        options: StepOptions,
        q: tuple[Distribution, ...] = (),
    ) -> Acceptance:
        """Compute every node's row from its own path, one at a time."""
        self.num_steps += 1
        rows = np.stack([self.logits([*context.ids, *path]) for path in tree.paths])
        prompt, output = context.ids[: context.prompt_len], context.output
        processed = process_tree_logits(rows, tree, prompt, output, sampling)
        accepted = decide(processed, tree, q, len(context), sampling)
        tokens = np.array(Acceptance(accepted.path, accepted.next_token).tokens(tree))
        target_tokens = sample(processed, len(context) + tree.depths, sampling).astype(np.int32)
        logprobs = log_softmax(rows)[[0, *accepted.path], tokens]
        return Acceptance(
            accepted.path,
            accepted.next_token,
            target_tokens=target_tokens if options.target_tokens else None,
            logprobs=logprobs if options.logprobs else None,
            node_top_ids=top_ids(rows, options.num_node_top) if options.num_node_top else None,
        )

    def release(self) -> None:
        """Record that the request has ended."""
        self.released = True


def top_ids(rows: FloatArray, num_top: int) -> IdArray:
    """Return the ids of the largest logits of every row, in order, the lowest id first among equals."""
    return np.argsort(-rows, axis=1, kind="stable")[:, :num_top].astype(np.int32)
