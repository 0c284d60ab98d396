"""The methods that draft from tokens alone: in native code, or by the Python references where it is not compiled."""

from __future__ import annotations

from collections.abc import Sequence

from native.drafts import (
    NativeProposer,
    PredictionBinding,
    native_predicted,
    native_prompt_lookup,
    native_suffix,
)
from native.drafts_library import PredictedOptions, PromptLookupOptions, SuffixOptions
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, NativeDrafts, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.drafting.corpus import native_corpus
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.memory import Recollection
from orchestrator.drafting.predicted import Predicted, PredictedConfig
from orchestrator.drafting.prompt_lookup import MAX_NGRAM, PromptLookup, PromptLookupConfig
from orchestrator.drafting.suffix import SOURCES, Suffix, SuffixConfig

#: The values of `match` and of `clip` by their numbers in prompt_lookup.h.
MATCHES = ("recent", "frequent", "leftmost")
CLIPS = (False, True, "skip")


class NativeMethod(Proposer):
    """Drafts in native code, also in the bursts of an engine.

    sources: indexed by the numbers that native code gives to the sources of nodes. max_nodes: maximum nodes of a tree.
    Invariant: its proposals are those of the reference.
    """

    def __init__(self, name: str, sources: tuple[str, ...], native: NativeProposer, max_nodes: int) -> None:
        self.name, self._sources = name, sources
        self._native, self._max_nodes = native, max_nodes
        self._num_read, self._budget = 0, Budget(0, 0)

    @property
    def native_drafts(self) -> NativeDrafts | None:
        """What makes the next proposals."""
        native, budget = self._native, self._budget
        max_nodes = min(budget.max_nodes, self._max_nodes)
        return NativeDrafts(native, max_nodes, budget.max_depth, self._sources, native.handle, native.next_address)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the tree after the context."""
        unread, self._num_read, self._budget = context.ids[self._num_read :], len(context), budget
        tree, numbers = self._native.next(unread, budget.max_nodes, budget.max_depth)
        return Proposal(tree, tuple(self._sources[number] for number in numbers))

    def observe_native(self, steps: Sequence[Step]) -> None:
        """Note that native code has read the steps' tokens."""
        self._num_read += sum(step.acceptance.num_tokens for step in steps)


class NativePredicted(NativeMethod):
    """Follows the output, but not the prompt, through the client's prediction."""

    def __init__(self, native: PredictionBinding, draft_len: int) -> None:
        super().__init__(Predicted.name, (Predicted.name,), native, draft_len)
        self._read_prompt = native.read_prompt

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the next tokens of the prediction, or a bare root where it does not fit."""
        if not self._num_read:
            self._num_read = context.prompt_len
            self._read_prompt(context.ids[max(context.prompt_len - MAX_NGRAM, 0) : context.prompt_len])
        return super().propose(context, sampling, budget)


def predicted(config: PredictedConfig, dependencies: ProposerDependencies) -> Proposer:
    """Return the proposer of predicted outputs."""
    options = PredictedOptions(config.max_ngram, config.draft_len)
    native = native_predicted(options, dependencies.prediction)
    return NativePredicted(native, config.draft_len) if native else Predicted(config, dependencies)


def prompt_lookup(config: PromptLookupConfig, dependencies: ProposerDependencies) -> Proposer:
    """Return the proposer of prompt lookup."""
    is_grown, order, clip = config.length == "grown", MATCHES.index(config.match), CLIPS.index(config.clip)
    options = PromptLookupOptions(config.max_ngram, config.draft_len, config.branches, is_grown, order, clip)
    if not (native := native_prompt_lookup(options)):
        return PromptLookup(config, dependencies)
    return NativeMethod(PromptLookup.name, (PromptLookup.name,), native, config.branches * config.draft_len)


def suffix(config: SuffixConfig, dependencies: ProposerDependencies) -> Proposer:
    """Return the proposer of suffix decoding."""
    memory, corpus = dependencies.memory, dependencies.corpus
    options = SuffixOptions(config.max_depth, config.draft_len, config.is_chain, config.factor, config.min_prob)
    if isinstance(memory, Recollection):  # the reference's memory, which native code cannot read
        return Suffix(config, dependencies)
    if not (native := native_suffix(options, memory, native_corpus(corpus) if corpus else None)):
        return Suffix(config, dependencies)
    return NativeMethod(Suffix.name, SOURCES, native, config.draft_len)
