"""Steps and drafts at the door of NVIDIA's backend: what it has no room for is cut, what it cannot do is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.errors import EngineError, RequestError
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, DraftResponse, EngineSpeculationResult, IdArray
from orchestrator.deployment.engine_trees import sizes_refusal
from orchestrator.wire.context import Delta
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from orchestrator.wire.tensors import Incoming, scalar
from runtime.trtllm.backend.client import EngineRequest
from runtime.trtllm.backend.tensors import (
    ACCEPTED,
    DRAFTED,
    OUTPUTS,
    Backend,
    accepted,
    burst_tensors,
    draft_tensors,
    new_tokens,
    step_tensors,
)

#: Most tokens of a burst.
BURST = 32


class StepAdapter:
    """Answers target steps; implements `runtime.trtllm.backend.client.Adapter`."""

    def __init__(self, backend: Backend, shares_blocks: bool) -> None:
        """shares_blocks: the engine reuses KV blocks, those of any request for any other."""
        self._backend = backend
        self._shares_blocks = shares_blocks

    def ask(self, request: StepRequest, context_ids: IdArray) -> EngineRequest[StepRequest]:
        """Return the call; of a chain, as much as the engine has room for."""
        _check_salt(request.delta, self._shares_blocks)
        room = min(self._backend.max_draft_len, self._backend.max_seq_len - len(context_ids) - 1)
        if request.tree.is_chain and request.tree.num_nodes > room:
            request = replace(request, tree=TokenTree.chain(request.tree.tokens[: max(room, 0)]))
        return EngineRequest(step_tensors(request, context_ids, self._backend), request)

    def answer(self, request: StepRequest, context_ids: IdArray, responses: Sequence[Incoming]) -> Acceptance:
        """Return what the step decided."""
        return accepted(responses, request.tree, context_ids, self._backend)


class EngineSideAdapter:
    """Answers target steps of an engine that drafts by itself; implements `runtime.trtllm.backend.client.Adapter`.

    A call brings BURST tokens at most: its first pass reads the context's end anew and has no drafts, and what comes
    behind a stop is thrown away. Invariant: at temperature 0, which is all that it serves, the text is the target's.
    """

    def __init__(self, backend: Backend, shares_blocks: bool, method: str, sizes: tuple[int, ...] = ()) -> None:
        """sizes: Lookahead's of the engine, the most that a request may ask for."""
        self._sizes = sizes
        self._backend = backend
        self._shares_blocks = shares_blocks
        self._method = method

    def ask(self, request: StepRequest, context_ids: IdArray) -> EngineRequest[StepRequest]:
        """Return the call; a step that wants no drafts is one of a single token."""
        _check_salt(request.delta, self._shares_blocks)
        inside = request.options.engine_speculation
        if inside and inside.choices:
            raise RequestError("NVIDIA's backend has no tensor for choices; its configuration has the engine's tree")
        if inside and inside.sizes and (refusal := sizes_refusal(inside.sizes, self._sizes)):
            raise RequestError(refusal)
        room = self._backend.max_seq_len - len(context_ids)
        length = min(inside.length, BURST, room) if inside else 1
        tensors = burst_tensors(request, context_ids, length, self._backend)
        return EngineRequest(tensors, request, (*OUTPUTS, ACCEPTED, DRAFTED))

    def answer(self, request: StepRequest, context_ids: IdArray, responses: Sequence[Incoming]) -> Acceptance:
        """Return the tokens; passes are tokens less accepted drafts, as far as the engine has counted them."""
        tokens = new_tokens(responses, context_ids, self._backend)
        if not tokens:
            raise EngineError("the backend answered no new token")
        if request.options.engine_speculation is None:
            return Acceptance((), tokens[0])
        num_passes = len(tokens) - min(_count(responses, ACCEPTED), len(tokens) - 1)
        lengths = (len(tokens) - num_passes + 1, *[1] * (num_passes - 1))
        burst = EngineSpeculationResult(self._method, tuple(tokens[:-1]), lengths, _count(responses, DRAFTED))
        return Acceptance((), tokens[-1], engine_speculation=burst)


def _count(responses: Sequence[Incoming], name: str) -> int:
    """Return what the engine has counted; whether each kind of engine counts is not established: 0 = it has not."""
    return next((max(scalar(tensors, name), 0) for tensors in responses if name in tensors), 0)


class DraftAdapter:
    """Answers draft calls, greedily at any temperature; implements `runtime.trtllm.backend.client.Adapter`."""

    def __init__(self, backend: Backend, shares_blocks: bool) -> None:
        self._backend = backend
        self._shares_blocks = shares_blocks

    def ask(self, request: DraftRequest, context_ids: IdArray) -> EngineRequest[DraftRequest] | DraftResponse:
        """Return the call, or a bare root where no draft fits."""
        _check_salt(request.delta, self._shares_blocks)
        length = min(request.max_nodes, request.max_depth, self._backend.max_seq_len - len(context_ids))
        if length < 1:
            return DraftResponse(TokenTree.bare())
        return EngineRequest(draft_tensors(context_ids, length, self._backend), request)

    def answer(self, request: DraftRequest, context_ids: IdArray, responses: Sequence[Incoming]) -> DraftResponse:
        """Return the chain of the new tokens."""
        return DraftResponse(TokenTree.chain(new_tokens(responses, context_ids, self._backend)))


def _check_salt(delta: Delta, shares_blocks: bool) -> None:
    if delta.cache_salt and shares_blocks:
        raise RequestError(
            "cache_salt keeps the KV blocks of some requests from others, which NVIDIA's backend has no tensor for "
            "(input cache_salt; engine = 'tensorrt_llm' has it)"
        )
