"""The types that the loop, the proposers and the engines share: the calls of an engine, and its answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntFlag
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.core.arrays import Features, FloatArray, IdArray, total
from orchestrator.core.context import Context
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree

#: Maximum rows of hidden states in one call.
MAX_FEATURE_ROWS = 512


class HiddenStates(IntFlag):
    """The target's hidden states that a drafting head reads (docs/wire.md, Which hidden state).

    LAST: after the final norm, d numbers per token. LAYERS: the inputs of decoder layers 2, L // 2 and L − 3,
    concatenated, 3d numbers per token. If both are requested, LAST comes first.
    """

    NONE = 0
    LAST = 1
    LAYERS = 2


class Distribution(NamedTuple):
    """A sparse distribution q.

    ids: (k,) int32, ascending. weights: (k,) float32 > 0; they cross the wire unchanged and need not sum to 1.
    """

    ids: IdArray
    weights: npt.NDArray[np.float32]

    @property
    def probs(self) -> FloatArray:
        """Return the probabilities of `ids`, (k,) float64, with sum 1."""
        weights = self.weights.astype(np.float64)
        probs: FloatArray = weights / total(weights)
        return probs


@dataclass(frozen=True)
class EngineSpeculation:
    """Options for an engine that drafts by itself; an empty tuple keeps what the engine was built with.

    length: maximum tokens that the sequence may still get. choices: the nodes of its tree, each as the ranks on its
    path. sizes: Lookahead's window, n-gram and guesses.
    """

    length: int
    choices: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()


class EngineSpeculationResult(NamedTuple):
    """What an engine that drafts by itself did since its last answer.

    method: how it drafts. extra: the tokens that it committed before next_token.
    lengths: the tokens that each of its passes committed: accepted drafts + 1. They sum to len(extra) + 1.
    num_drafted: how many draft tokens it verified.
    """

    method: str
    extra: tuple[int, ...]
    lengths: tuple[int, ...]
    num_drafted: int


@dataclass(frozen=True)
class StepOptions:
    """What a step returns besides the accepted path.

    target_tokens: the target's own token at every node. logprobs: the log probabilities of the emitted tokens.
    features_from, hidden_states: the first position whose hidden states are returned, and their kinds; None and NONE:
    no features.
    num_top: how many of the most probable tokens to return for each position.
    engine_speculation: for an engine that drafts by itself; None: it returns the next token only.
    num_node_top: how many of the most probable tokens to return for every node, the root included.
    """

    target_tokens: bool = False
    logprobs: bool = False
    features_from: int | None = None
    num_top: int = 0
    hidden_states: HiddenStates = HiddenStates.NONE
    engine_speculation: EngineSpeculation | None = None
    num_node_top: int = 0

    def merged(self, other: StepOptions) -> StepOptions:
        """Return the options that include both; features start at the earlier of the two positions."""
        return StepOptions(
            self.target_tokens or other.target_tokens,
            self.logprobs or other.logprobs,
            min((start for start in (self.features_from, other.features_from) if start is not None), default=None),
            max(self.num_top, other.num_top),
            self.hidden_states | other.hidden_states,
            self.engine_speculation or other.engine_speculation,
            max(self.num_node_top, other.num_node_top),
        )


class PassLoad(NamedTuple):
    """What a pass computed.

    num_rows: rows of all calls. num_steps: steps that it completed. mean_rows, mean_tokens: rows and committed tokens
    of one of these steps, on average. is_atypical: its time is not that of a step, since it also read prompts or
    parts of them, or held only large drafts, apart from the other steps. num_kv_tokens: tokens of all contexts.
    num_row_kv_tokens: tokens that each row attends to, summed over the rows. num_in_separate_pass: requests whose steps
    ran in a separate pass beside it, or waited for one.
    """

    num_rows: int
    num_steps: int
    mean_rows: float
    mean_tokens: float
    is_atypical: bool = False
    num_kv_tokens: int = 0
    num_row_kv_tokens: int = 0
    num_in_separate_pass: int = 0


@dataclass(frozen=True, eq=False)
class Acceptance:
    """The answer to a target step. Arrays that the step's options do not request are None.

    path: the a accepted nodes, root not included, each the child of the one before it.
    next_token: the bonus or recovered token; it becomes the new root.
    target_tokens: (m + 1,) int32, the target's own token at every node.
    logprobs: (a + 1,) float64, the log probability of each emitted token, those of engine_speculation included.
    top_ids, top_logprobs: (a + 1, n) int32 and float64, the n most probable tokens of each position, the best first.
    features: (r, width) float32, the hidden states of the positions from features_start on.
    queue_us, forward_us, verify_us: microseconds of waiting for the pass, of the forward pass, and of verification.
    num_in_pass: requests that shared the pass or ran in a separate one beside it. num_in_separate_pass: only those that
    ran in a separate one.
    load: what the pass computed; None outside the engine's process.
    num_cached_tokens: tokens of the context that were in the cache when the engine first saw the sequence.
    engine_speculation: only from an engine that drafts by itself.
    node_top_ids: (m + 1, k) int32, the k most probable tokens after every node by the raw logits, the best first.
    """

    path: tuple[int, ...]
    next_token: int
    target_tokens: IdArray | None = None
    logprobs: FloatArray | None = None
    top_ids: IdArray | None = None
    top_logprobs: FloatArray | None = None
    features: Features | None = None
    features_start: int = 0
    forward_us: int = 0
    num_in_pass: int = 1
    num_cached_tokens: int = 0
    engine_speculation: EngineSpeculationResult | None = None
    queue_us: int = 0
    verify_us: int = 0
    node_top_ids: IdArray | None = None
    load: PassLoad | None = None
    num_in_separate_pass: int = 0

    @property
    def is_atypical(self) -> bool:
        """True if the pass time is not representative of a step, for example because the pass also read prompts."""
        return bool(self.load and self.load.is_atypical)

    def top_tokens(self, num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the top ids of the first positions and their log probabilities; empty if not requested."""
        if self.top_ids is None or self.top_logprobs is None:
            return [], []
        return self.top_ids[:num_tokens].tolist(), self.top_logprobs[:num_tokens].tolist()

    @property
    def extra(self) -> tuple[int, ...]:
        """Tokens accepted after the path from the engine's own drafts, which are in no tree of ours."""
        return self.engine_speculation.extra if self.engine_speculation else ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this step commits."""
        return len(self.path) + len(self.extra) + 1

    def tokens(self, tree: TokenTree) -> list[int]:
        """Return the tokens that this step commits: those of the path, the engine's own, and the new root."""
        return [*(int(tree.tokens[node - 1]) for node in self.path), *self.extra, self.next_token]


@dataclass(frozen=True, eq=False)
class HeadInput:
    """What a drafting head receives besides the context.

    features: (r, width) float32, r at most MAX_FEATURE_ROWS: hidden states of the positions from features_start on.
    choices: the shape of a static tree; its tokens are ranks, 0 = the most probable child.
    width: how many nodes each level of a dynamic tree expands, or the number of beams.
    min_prob: the lowest probability of a path, as the drafter sees it: a head's tree has no less likely node, and a
    draft model's chain ends after its first such node.
    draws: sample the children of each node from q without replacement, in the order in which they are tried; for rules
    that read q. No sampled token may be left out because of what it is, so min_prob then applies, in a static tree, to
    the path of the parent, and in a dynamic tree to a bound on the child's path that is known before its token is
    sampled.
    sharpness: how sure the drafter is of its guesses: 1 = as sure as its q, 0 = the drafter's own (`Sharpness.of`).
    Without choices and width, a head uses its own static tree, and a draft model drafts a chain.
    """

    features: Features | None = None
    features_start: int = 0
    choices: TokenTree = field(default_factory=TokenTree.bare)
    width: int = 0
    min_prob: float = 0.0
    draws: bool = False
    sharpness: float = 0.0

    @property
    def min_score(self) -> float:
        """Return log(min_prob)."""
        return math.log(self.min_prob) if self.min_prob > 0.0 else -math.inf

    def features_since(self, first: int) -> Features:
        """Return the hidden states of the positions from `first` on, which must be there."""
        assert self.features is not None
        return self.features[first - self.features_start :]


NO_HEAD_INPUT = HeadInput()


class DraftResponse(NamedTuple):
    """A drafter's answer.

    q: the distribution that each node was sampled from; empty for deterministic drafts.
    cached_len: tokens in the drafter's cache; if it reads hidden states, the first position whose state it lacks.
    """

    tree: TokenTree
    q: tuple[Distribution, ...] = ()
    cached_len: int = 0


class Target(Protocol):
    """The model whose distribution is served."""

    def step(
        self,
        context: Context,
        tree: TokenTree,
        sampling: Sampling,
        options: StepOptions,
        q: tuple[Distribution, ...] = (),
    ) -> Acceptance:
        """Run one pass over the tree below the context's root, and decide which nodes are accepted.

        q: the distribution that each node was sampled from; empty for deterministic drafts.
        """

    def release(self) -> None:
        """Tell the target that no more steps follow; a hint, on which correctness does not depend."""


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot of an engine's KV blocks, and totals since its start: passes, calls in them, their time, preemptions.

    blocks_held: blocks of live sequences. blocks_cached: blocks that no sequence holds, but that can still be found by
    content. num_sequences: live sequences.
    """

    blocks_held: int
    blocks_cached: int
    blocks_free: int
    blocks_total: int
    num_sequences: int
    num_passes: int
    num_calls: int
    pass_s: float = 0.0
    num_preempted: int = 0


@dataclass
class DraftCounts:
    """The calls of one drafter: all that were made, those that came too late, that failed, and that were not made."""

    num_calls: int = 0
    num_late: int = 0
    num_failed: int = 0
    num_skipped: int = 0
