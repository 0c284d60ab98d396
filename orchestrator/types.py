"""The nouns that the loop, the proposers and the engines share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.context import Context
from orchestrator.tree import TokenTree

FloatArray = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int32]

# Medusa's (arXiv:2401.10774, section 2.3.1), as float32 has them, since that is how they cross the wire.
EPSILON, DELTA = float(np.float32(0.09)), float(np.float32(0.3))


class Rule(StrEnum):
    """How drafts are accepted (orchestrator/accept.py); `typical` alone is lossy.

    `engine` is decided by an engine that samples by itself (TensorRT-LLM's), with random numbers of its own: its texts
    have the target's law, but one seed gives other texts under other drafts.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"
    TYPICAL = "typical"
    ENGINE = "engine"

    @property
    def uses_q(self) -> bool:
        """True when it matters what a draft was drawn from."""
        return self in (Rule.REJECTION, Rule.BLOCK)


class States(IntFlag):
    """Hidden states of the target that a drafting head reads (docs/protocol.md, Which hidden state).

    LAST: after the final norm, (d,) a token. LAYERS: the inputs of decoder layers 2, L // 2 and L − 3, side by side,
    (3d,). Of both, LAST stands first.
    """

    NONE = 0
    LAST = 1
    LAYERS = 2


class Grammar(NamedTuple):
    """What the output must match. kind: json, json_schema or regex. text: the schema or the expression."""

    kind: str
    text: str


@dataclass(frozen=True)
class Edits:
    """What a request changes of single tokens' logits; empty changes nothing.

    bias: (id, weight), added to the logit. grammar: what the output must match. allowed: the only ids that may come;
    empty = all. bad_words: id sequences that may not come. end_ids: those that end the output, and that may not come
    before min_tokens.
    """

    bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()


NO_EDITS = Edits()


@dataclass(frozen=True)
class Sampling:
    """How logits become the one distribution p, and how drafts are accepted; the defaults change nothing.

    temperature 0 = greedy · top_k 0 = off · top_p, typical_p 1 = off · min_p 0 = off · repetition_penalty 1 = off,
    on prompt and output · presence_penalty, frequency_penalty 0 = off, on the output · min_tokens: so many before an
    end. The seed keys the noise. epsilon, delta: of the rule `typical`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    epsilon: float = EPSILON
    delta: float = DELTA
    seed: int = 0
    rule: Rule = Rule.COUPLED
    edits: Edits = NO_EDITS

    @property
    def greedy(self) -> bool:
        """True when the pick is the argmax of the logits."""
        return self.temperature == 0.0

    @property
    def truncated(self) -> bool:
        """True when a rule takes tokens out of p."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0

    @property
    def penalised(self) -> bool:
        """True when what was said changes what may be said."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def shaped(self) -> bool:
        """True when single logits change before the temperature (orchestrator/shaping.py)."""
        edits = self.edits
        masked = edits.bias or edits.grammar or edits.allowed or edits.bad_words
        return bool(self.penalised or masked or (self.min_tokens and edits.end_ids))


class Distribution(NamedTuple):
    """A sparse q: ids (k,) int32, ascending, and weights (k,) float32 > 0, which cross a wire unchanged."""

    ids: IdArray
    weights: npt.NDArray[np.float32]

    @property
    def probs(self) -> FloatArray:
        """Return the probabilities of `ids`, (k,) float64, which sum to 1."""
        weights = self.weights.astype(np.float64)
        probs: FloatArray = weights / weights.sum()
        return probs


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
        return self.only(self.tree.within(budget.max_nodes, budget.max_depth))

    def only(self, kept: IdArray) -> Proposal:
        """Return the proposal of these nodes alone, (k,) int32 ascending, the parent of each among them or the root."""
        if len(kept) == self.tree.num_nodes:
            return self
        drawn_from = tuple(self.q[node - 1] for node in kept) if self.q else ()
        return Proposal(self.tree.only(kept), tuple(self.sources[node - 1] for node in kept), drawn_from)


#: The rules that engines of our own decide by.
OUR_RULES = tuple(rule for rule in Rule if rule is not Rule.ENGINE)


class Burst(NamedTuple):
    """What an engine that drafts by itself did behind one answer.

    method: what it drafts with. extra: tokens that it committed before next_token. lengths: tokens of each of its
    passes, accepted drafts and its own one, so that their sum is that of all tokens. num_drafted: tokens that it
    verified.
    """

    method: str
    extra: tuple[int, ...]
    lengths: tuple[int, ...]
    num_drafted: int


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What one target step decided.

    path: accepted nodes, root not included, each the child of the one before it.
    next_token: the bonus or recovered token; it becomes the new root.
    picks: (m + 1,) int32, the target's own pick at every node, when wanted.
    logprobs: (a + 1,) float64, log-probability of each emitted token, when wanted. top_ids, top_logprobs: (a + 1, n)
    int32 and float64, the n likeliest tokens of each position in order, when wanted.
    features: (r, width) float32, hidden states of positions features_start …, when wanted.
    forward_us: cost of the pass. num_in_pass: requests that shared it. num_cached_tokens: tokens of the
    context that were found in the cache when the engine first saw the sequence.
    burst: of an engine that drafts by itself.
    """

    path: tuple[int, ...]
    next_token: int
    picks: IdArray | None = None
    logprobs: FloatArray | None = None
    top_ids: IdArray | None = None
    top_logprobs: FloatArray | None = None
    features: Features | None = None
    features_start: int = 0
    forward_us: int = 0
    num_in_pass: int = 1
    num_cached_tokens: int = 0
    burst: Burst | None = None

    def logprobs_list(self) -> list[float]:
        """Return the log-probabilities as a list, empty when they were not wanted."""
        return [] if self.logprobs is None else [float(x) for x in self.logprobs]

    def top_lists(self, num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the likeliest tokens of the first positions, and their log-probabilities; empty when not wanted."""
        if self.top_ids is None or self.top_logprobs is None:
            return [], []
        return self.top_ids[:num_tokens].tolist(), self.top_logprobs[:num_tokens].tolist()

    @property
    def extra(self) -> tuple[int, ...]:
        """Tokens behind the path that no tree held: an engine's own drafts."""
        return self.burst.extra if self.burst else ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this step commits."""
        return len(self.path) + len(self.extra) + 1

    def tokens(self, tree: TokenTree) -> list[int]:
        """Return the tokens that this step commits: the path's, an engine's own, the new root."""
        return [*(int(tree.tokens[node - 1]) for node in self.path), *self.extra, self.next_token]


@dataclass(frozen=True, eq=False)
class HeadInput:
    """What a drafting head is told beside the context.

    features: (r, width) float32, hidden states of positions features_start …; None = none.
    choices: the shape of a static tree, whose tokens are ranks: 0 = the likeliest child. width: nodes that a level of
    a dynamic tree expands, or beams. With neither, the tree is the head's own static one.
    """

    features: Features | None = None
    features_start: int = 0
    choices: TokenTree = field(default_factory=TokenTree.bare)
    width: int = 0


class Drafted(NamedTuple):
    """A drafter's answer: a tree, and what its nodes were drawn from (empty = chosen).

    cached_len: how far its cache reaches; for a drafter that reads hidden states, the first position that it lacks.
    """

    tree: TokenTree
    q: tuple[Distribution, ...] = ()
    cached_len: int = 0


@dataclass(frozen=True)
class Inside:
    """What is asked of an engine that drafts by itself.

    length: most tokens that may still come. choices: the shape of its tree, each node as the ranks on its path. sizes:
    Lookahead's window, n-gram and guesses. Empty = as the engine was built.
    """

    length: int
    choices: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Want:
    """What a step shall answer beside the accepted path; `features_from` None means no features.

    num_top: so many of the likeliest tokens of each position. states: which hidden states the features are.
    inside: that an engine which drafts by itself does so; None = it gives the next token alone.
    """

    picks: bool = False
    logprobs: bool = False
    features_from: int | None = None
    num_top: int = 0
    states: States = States.LAST
    inside: Inside | None = None

    def joined(self, other: Want) -> Want:
        """Return what either asks for; features from the earlier position."""
        return Want(
            self.picks or other.picks,
            self.logprobs or other.logprobs,
            min((start for start in (self.features_from, other.features_from) if start is not None), default=None),
            max(self.num_top, other.num_top),
            self.read | other.read,
            self.inside or other.inside,
        )

    @property
    def read(self) -> States:
        """The hidden states that are wanted."""
        return States.NONE if self.features_from is None else self.states


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

    def step(
        self, context: Context, tree: TokenTree, sampling: Sampling, want: Want, q: tuple[Distribution, ...] = ()
    ) -> Acceptance:
        """Run one pass over the tree below the context's root and decide what is accepted.

        q: what the nodes were drawn from; empty = chosen.
        """

    def release(self) -> None:
        """Say that no step follows; a hint, never needed for correctness."""


class Proposer(Protocol):
    """A drafting method at work for one request; a subclass that learns or holds nothing need not say so."""

    name: str

    @property
    def want(self) -> Want:
        """What it asks of the step that verifies its last proposal."""

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
