"""Methods that look tokens up in native code: prompt lookup, suffix decoding and predicted outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from native.drafts import NativeProposer, native_predicted, native_prompt_lookup, native_suffix
from native.drafts_library import PredictedOptions, PromptLookupOptions, SuffixOptions
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES
from orchestrator.drafting.corpus import MAX_DEPTH, native_corpus
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.parameters import MethodConfig

#: A token costs about 150 bytes for each n, and a request with a long prompt must not fill the memory.
MAX_NGRAM = 8
#: The values of `match` and of `clip` by their numbers in prompt_lookup.h.
MATCHES = ("recent", "frequent", "leftmost")
CLIPS = (False, True, "skip")
#: The sources of `suffix` in the order of their numbers in suffix.h.
SUFFIX_SOURCES = ("suffix.text", "suffix.memory", "suffix.corpus")


class NativeMethod(Proposer):
    """Drafts in native code, also in the bursts of an engine.

    sources: indexed by the numbers that native code gives to the sources of nodes. max_nodes: maximum nodes of a tree.
    """

    is_sized = False

    def __init__(self, name: str, sources: tuple[str, ...], native: NativeProposer, max_nodes: int) -> None:
        self.name, self._sources = name, sources
        self._native, self._max_nodes = native, max_nodes
        self._num_read, self._budget = 0, Budget(0, 0)

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next proposals."""
        native, budget = self._native, self._budget
        return NativeDrafts(
            native,
            min(budget.max_nodes, self._max_nodes),
            budget.max_depth,
            self._sources,
            native.handle,
            self.is_sized,
        )

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the tree after the context."""
        unread, self._num_read, self._budget = context.ids[self._num_read :], len(context), budget
        tree, numbers = self._native.next(unread, budget.max_nodes, budget.max_depth)
        return Proposal(tree, tuple(self._sources[number] for number in numbers))

    def observe(self, steps: Sequence[Step]) -> None:
        """Note which tokens native code has read."""
        self._num_read += sum(step.acceptance.num_tokens for step in steps if step.is_native)


class PromptLookupConfig(MethodConfig):
    """Which places are looked up, and how many of the tokens that followed are proposed.

    max_ngram: longest suffix looked up. draft_len: maximum tokens of a continuation.
    match: which of several places comes first; frequent = those with the most frequent next token.
    branches: maximum continuations; they differ in their first token.
    length: fixed = draft_len tokens; grown = twice as many tokens as agree before the place.
    clip: where the text ends before the continuation does, end it there (true), go on with its own copy (false), or
    skip the place, as in the first published version (skip).
    """

    max_ngram: int = Field(3, ge=1, le=MAX_NGRAM)
    draft_len: int = Field(20, ge=1, le=MAX_NODES)
    match: Literal["recent", "frequent", "leftmost"] = "recent"
    branches: int = Field(1, ge=1, le=16)
    length: Literal["fixed", "grown"] = "grown"
    clip: bool | Literal["skip"] = False

    @property
    def is_chain(self) -> bool:
        """True when there is one continuation."""
        return self.branches == 1


class PromptLookup(NativeMethod):
    """Proposes the continuations of earlier occurrences of the longest matching suffix.

    Source: prompt lookup decoding, Saxena 2023; docs/methods/prompt_lookup.md.
    """

    def __init__(self, config: PromptLookupConfig, dependencies: ProposerDependencies) -> None:
        is_grown, order, clip = config.length == "grown", MATCHES.index(config.match), CLIPS.index(config.clip)
        options = PromptLookupOptions(config.max_ngram, config.draft_len, config.branches, is_grown, order, clip)
        native = native_prompt_lookup(options)
        super().__init__("prompt_lookup", ("prompt_lookup",), native, config.branches * config.draft_len)


class SuffixConfig(MethodConfig):
    """max_depth: longest suffix looked up. factor: draft nodes per token of the match.

    min_prob: least estimated probability of a draft node's path. draft_len: maximum draft nodes.
    tree: the likeliest paths; false: only the chain of the most frequent followers.
    """

    max_depth: int = Field(24, ge=1, le=MAX_DEPTH)
    factor: float = Field(1.5, ge=0.0, le=MAX_NODES)
    min_prob: float = Field(0.1, ge=0.0, le=1.0)
    draft_len: int = Field(32, ge=1, le=MAX_NODES)
    tree: bool = True

    @property
    def is_chain(self) -> bool:
        """True when the draft is one path."""
        return not self.tree


class Suffix(NativeMethod):
    """Drafts from the request's own text, earlier responses or a corpus, whichever promises the most accepted tokens.

    Source: suffix decoding, Oliaro et al. 2024, arXiv:2411.04975; docs/methods/suffix.md.
    """

    def __init__(self, config: SuffixConfig, dependencies: ProposerDependencies) -> None:
        options = SuffixOptions(config.max_depth, config.draft_len, config.is_chain, config.factor, config.min_prob)
        corpus = native_corpus(dependencies.corpus) if dependencies.corpus else None
        native = native_suffix(options, dependencies.memory, corpus)
        super().__init__("suffix", SUFFIX_SOURCES, native, config.draft_len)


class PredictedConfig(MethodConfig):
    """draft_len: tokens proposed. max_ngram: maximum tokens that must agree to follow the prediction again."""

    draft_len: int = Field(16, ge=1, le=MAX_NODES)
    max_ngram: int = Field(6, ge=1, le=MAX_NGRAM)


class Predicted(NativeMethod):
    """Proposes the client's prediction; after a divergence, it resumes where the last tokens agree with the prediction.

    Source: predicted outputs, docs/methods/predicted.md.
    """

    def __init__(self, config: PredictedConfig, dependencies: ProposerDependencies) -> None:
        options = PredictedOptions(config.max_ngram, config.draft_len)
        native = native_predicted(options, dependencies.prediction)
        super().__init__("predicted", ("predicted",), native, config.draft_len)
        self._read_prompt = native.read_prompt

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the next tokens of the prediction, or a bare root where it does not fit."""
        if not self._num_read:  # the output follows the prediction, the prompt does not
            self._num_read = context.prompt_len
            self._read_prompt(context.ids[max(context.prompt_len - MAX_NGRAM, 0) : context.prompt_len])
        return super().propose(context, sampling, budget)
