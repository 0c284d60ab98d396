"""The nouns that the loop, the proposers and the engines share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.tree import TokenTree

FloatArray = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]

HASH_MULTIPLIER = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Sampling:
    """How logits become the one distribution p; the defaults change nothing, and temperature 0 is greedy.

    temperature ≥ 0 · top_k 0 = off · top_p 1 = off · min_p 0 = off. The seed keys the noise.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True when the pick is the argmax of the logits."""
        return self.temperature == 0.0

    @property
    def truncated(self) -> bool:
        """True when a rule takes tokens out of p."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Context:
    """The committed tokens of one request, the last one the root; the loop only ever appends.

    `rolling_hash(n)` names the first n tokens, so that an engine can tell that it holds the same ones.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = list(prompt)
        self.prompt_len = len(self.ids)
        self._hashes = [0]

    def __len__(self) -> int:
        """Return prefix_len: prompt and output, the root included."""
        return len(self.ids)

    @property
    def root(self) -> int:
        """Id of the last committed token."""
        return self.ids[-1]

    @property
    def output(self) -> list[int]:
        """Ids committed since the prompt."""
        return self.ids[self.prompt_len :]

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens for good."""
        self.ids.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens (an engine's view may run ahead of the loop's)."""
        del self.ids[length:]
        del self._hashes[length + 1 :]

    def rolling_hash(self, length: int) -> int:
        """Return the 64-bit hash of the first `length` tokens, in O(tokens since the last call)."""
        for token in self.ids[len(self._hashes) - 1 : length]:
            self._hashes.append(extend_hash(self._hashes[-1], token))
        return self._hashes[length]


def extend_hash(value: int, token: int) -> int:
    """Return the rolling hash of a token sequence and one more token; the hash of none is 0."""
    return ((value + token + 1) * HASH_MULTIPLIER) & MASK64


class Distribution(NamedTuple):
    """A sparse q: ids (k,) int32, and their probabilities probs (k,) float64, which sum to 1."""

    ids: npt.NDArray[np.int32]
    probs: FloatArray


@dataclass(frozen=True, eq=False)
class Proposal:
    """A proposer's answer; a bare root means "no idea".

    sources: what made each of the nodes 1…m, for the statistics.
    q: for drawn drafts, the distribution that each of the nodes 1…m was drawn from; empty for chosen ones.
    """

    tree: TokenTree
    sources: tuple[str, ...]
    q: tuple[Distribution, ...] = ()

    @classmethod
    def none(cls) -> Proposal:
        """Return the proposal without a draft."""
        return cls(TokenTree.bare(), ())

    @classmethod
    def of(cls, tree: TokenTree, source: str) -> Proposal:
        """Return the proposal of a tree that one source made."""
        return cls(tree, (source,) * tree.num_nodes)

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> Proposal:
        """Return the proposal of one continuation."""
        return cls.of(TokenTree.chain(tokens), source)

    def cut(self, budget: Budget) -> Proposal:
        """Return the proposal without the nodes that the budget does not cover."""
        kept = self.tree.within(budget.max_nodes, budget.max_depth)
        if len(kept) == self.tree.num_nodes:
            return self
        drawn_from = tuple(self.q[node - 1] for node in kept) if self.q else ()
        return Proposal(self.tree.only(kept), tuple(self.sources[node - 1] for node in kept), drawn_from)


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What one target step decided.

    path: accepted nodes, root not included, each the child of the one before it.
    next_token: the bonus or recovered token; it becomes the new root.
    picks: (m + 1,) int32, the target's own pick at every node, when wanted.
    logprobs: (a + 1,) float64, log-probability of each emitted token, when wanted.
    features: (r, width) float32, hidden states of positions features_start …, when wanted.
    forward_us: cost of the pass. num_in_pass: requests that shared it. num_cached_tokens: tokens of the
    context that were found in the cache when the engine first saw the sequence.
    """

    path: tuple[int, ...]
    next_token: int
    picks: npt.NDArray[np.int32] | None = None
    logprobs: FloatArray | None = None
    features: Features | None = None
    features_start: int = 0
    forward_us: int = 0
    num_in_pass: int = 1
    num_cached_tokens: int = 0

    def logprobs_list(self) -> list[float]:
        """Return the log-probabilities as a list, empty when they were not wanted."""
        return [] if self.logprobs is None else [float(x) for x in self.logprobs]

    def tokens(self, tree: TokenTree) -> list[int]:
        """Return the a + 1 tokens that this step commits."""
        return [int(tree.tokens[node - 1]) for node in self.path] + [self.next_token]


@dataclass(frozen=True)
class Want:
    """What a step shall answer beside the accepted path; `features_from` None means no features."""

    picks: bool = False
    logprobs: bool = False
    features_from: int | None = None

    def joined(self, other: Want) -> Want:
        """Return what either asks for; features from the earlier position."""
        starts = [want.features_from for want in (self, other) if want.features_from is not None]
        return Want(self.picks or other.picks, self.logprobs or other.logprobs, min(starts, default=None))


@dataclass(frozen=True)
class Budget:
    """What a proposal may cost: draft nodes (root not counted) and levels below the root."""

    max_nodes: int
    max_depth: int

    def clipped(self, length: int) -> int:
        """Return the length of a chain of at most `length` nodes that fits."""
        return max(0, min(length, self.max_nodes, self.max_depth))


class Target(Protocol):
    """The model whose distribution is served."""

    def step(self, context: Context, tree: TokenTree, sampling: Sampling, want: Want) -> Acceptance:
        """Run one pass over the tree below the context's root and decide what is accepted."""

    def release(self) -> None:
        """Say that no step follows; a hint, never needed for correctness."""


class Proposer(Protocol):
    """A drafting method at work for one request; a subclass that learns or holds nothing need not say so."""

    name: str
    want: Want

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return a tree below the context's root, within the budget; a bare root is legal."""

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn what the target made of the last proposal; the context itself says what was committed."""
        return

    def close(self) -> None:
        """Free what is held for this request."""
        return


@dataclass(frozen=True)
class EngineStatus:
    """An engine's figures at one moment; passes and the jobs in them are counted since its start."""

    blocks_held: int
    blocks_cached: int
    blocks_free: int
    blocks_total: int
    num_sequences: int
    num_passes: int
    num_jobs: int
