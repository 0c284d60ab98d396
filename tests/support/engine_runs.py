"""Texts and drafts by engines of this process, without threads: what an engine answers can be compared between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.core.context import Context
from orchestrator.core.errors import ServingError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, DraftResponse, HeadInput, StepOptions
from runtime.engine.calls import EngineCall
from runtime.engine.draft import DraftEngine
from runtime.engine.target import TargetEngine
from runtime.models.heads.engines.base import HeadEngine

FAR_S = 1e12
MAX_PASSES = 200


def answers_of(engine: Any, requests: Sequence[Any]) -> list[Any]:
    """Return an engine's answers to calls that come together; raises the error of a refused call."""
    answers: dict[int, Any] = {}
    calls = [
        EngineCall(request, FAR_S, lambda answer, place=place: answers.update({place: answer}))  # type: ignore[misc]
        for place, request in enumerate(requests)
    ]
    for _ in range(MAX_PASSES):
        if not (calls := engine.advance(calls)):
            break
    found = [answers[place] for place in range(len(requests))]
    if error := next((each for each in found if isinstance(each, ServingError)), None):
        raise error
    return found


class Texts:
    """Requests that a target engine continues together. contexts: their tokens, which grow with each step."""

    def __init__(
        self, engine: TargetEngine, prompts: Sequence[list[int]], samplings: Sequence[Sampling], options: StepOptions
    ) -> None:
        self._engine, self._samplings, self._options = engine, samplings, options
        self.contexts = [Context(prompt) for prompt in prompts]
        self._sent = [0] * len(prompts)

    def step(self, trees: Sequence[TokenTree], q: Sequence[tuple[Distribution, ...]] = ()) -> list[Acceptance]:
        """Run a step of every request, and commit what it accepts."""
        requests = [
            StepRequest(delta_of(context, sent, 1 + place, ""), tree, sampling, self._options, 60_000, own)
            for place, (context, sent, tree, sampling, own) in enumerate(
                zip(self.contexts, self._sent, trees, self._samplings, q or [()] * len(trees), strict=True)
            )
        ]
        answers: list[Acceptance] = answers_of(self._engine, requests)
        self._sent = [len(context) for context in self.contexts]
        for context, tree, answer in zip(self.contexts, trees, answers, strict=True):
            context.commit(answer.tokens(tree))
        return answers


def branching(context: Context, text: Sequence[int], vocab_size: int) -> TokenTree:
    """Return a tree with a wrong branch, then one with the next three tokens of a text that begins with the prompt."""
    right = list(text[len(context) : len(context) + 3])
    if not right:
        return TokenTree.bare()
    wrong = [(token + 1) % vocab_size for token in right]
    return TokenTree.from_paths([wrong, [*right[:1], *wrong[1:]], right])


def drafts_of(
    engine: DraftEngine | HeadEngine,
    contexts: Sequence[Context],
    samplings: Sequence[Sampling],
    heads: Sequence[HeadInput],
    max_nodes: int = 8,
    max_depth: int = 4,
) -> list[DraftResponse]:
    """Return the drafts of several requests, each after its whole context."""
    return answers_of(
        engine,
        [
            DraftRequest(delta_of(context, 0, 1 + place, ""), sampling, max_nodes, max_depth, head)
            for place, (context, sampling, head) in enumerate(zip(contexts, samplings, heads, strict=True))
        ],
    )
