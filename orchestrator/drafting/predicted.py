"""Predicted outputs: the client sends the output that it expects, and the draft follows it as long as it fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from pydantic import Field

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.parameters import MethodConfig
from orchestrator.drafting.prompt_lookup import MAX_NGRAM, NgramIndex


class PredictedConfig(MethodConfig):
    """draft_len: tokens proposed. max_ngram: maximum tokens that must agree to follow the prediction again."""

    draft_len: int = Field(16, ge=1, le=MAX_NODES)
    max_ngram: int = Field(6, ge=1, le=MAX_NGRAM)


class Predicted(Proposer):
    """Proposes the client's prediction; after a divergence, it resumes where the last tokens agree with the prediction.

    Invariant: after k > 1 rejected drafts in a row the last k − 1 tokens must agree; if k − 1 exceeds max_ngram, the
    prediction is no longer used. After at most one rejection it is followed even where no token agrees, as if one token
    had been replaced. A draft is rejected if the text goes on with another token than its first, whatever other drafts
    shared its tree. Costs O(max_ngram) once per token of the prediction, and O(log of its length) per step.
    prediction: its token ids. expected: the index of its next token; its length once it has ended.
    Source: predicted outputs, docs/methods/predicted.md.
    """

    name = "predicted"

    def __init__(self, config: PredictedConfig, dependencies: ProposerDependencies) -> None:
        self._draft_len = config.draft_len
        self.prediction = list(dependencies.prediction)
        self._index = NgramIndex(config.max_ngram)
        self._index.extend(self.prediction)
        self.expected = 0
        self._agrees = True
        self._num_read: int | None = None
        self._num_rejected, self._has_drafted = 0, False

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the next tokens of the prediction, or a bare root where it does not fit."""
        self._read(context)
        length = budget.clipped(self._draft_len)
        draft = self.prediction[self.expected : self.expected + length] if length and self._fits(context.ids) else []
        self._has_drafted = bool(draft)
        return Proposal.chain(draft, self.name)

    def follow(self, context: Context) -> bool:
        """Move to the expected place after the text; return whether the prediction fits there."""
        self._read(context)
        return self._fits(context.ids)

    def _read(self, context: Context) -> None:
        """Follow the new output tokens through the prediction, up to the first token that differs."""
        start = context.prompt_len if self._num_read is None else self._num_read
        for token in context.ids[start:]:
            predicted = self.prediction[self.expected : self.expected + 1]
            self._agrees = self._agrees and predicted == [token]
            self.expected = min(self.expected + 1, len(self.prediction))
            if self._has_drafted:
                self._num_rejected = 0 if self._agrees else self._num_rejected + 1
            self._has_drafted = False
        self._num_read = len(context)

    def _fits(self, ids: Sequence[int]) -> bool:
        """Return whether the prediction fits after the text.

        Where the text has left it, `expected` becomes the place after the longest known suffix of the text; of several,
        the one nearest to the previous `expected`.
        """
        if self._agrees:
            return True
        needed = max(self._num_rejected - 1, 0)
        places = next(self._index.matches(ids, max(needed, 1)), None)
        if places:
            self.expected = nearest(places, self.expected)
        self._agrees = bool(places) or not needed
        return self._agrees


def nearest(places: Sequence[int], to: int) -> int:
    """Return the place that is nearest to `to`, the later of two equally near ones; places: ascending."""
    at = bisect_left(places, to)
    return min(places[max(at - 1, 0) : at + 1], key=lambda place: (abs(place - to), -place))
