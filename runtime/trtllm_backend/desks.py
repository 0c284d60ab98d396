"""Steps and drafts at the door of NVIDIA's backend: what it has no room for is cut, what it cannot do is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.errors import RequestError
from orchestrator.tensors import Incoming
from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance, Drafted, IdArray
from orchestrator.wire import Delta, DraftRequest, StepRequest
from runtime.trtllm_backend.adapter import Backend, accepted, draft_tensors, new_tokens, step_tensors
from runtime.trtllm_backend.line import Asked


class StepDesk:
    """Answers target steps; implements `runtime.trtllm_backend.line.Desk`."""

    def __init__(self, backend: Backend, shares_blocks: bool) -> None:
        """shares_blocks: the engine reuses KV blocks, those of any request for any other."""
        self._backend = backend
        self._shares_blocks = shares_blocks

    def ask(self, request: StepRequest, context_ids: IdArray) -> Asked[StepRequest]:
        """Return the call; of a chain, as much as the engine has room for."""
        _check_salt(request.delta, self._shares_blocks)
        room = min(self._backend.max_draft_len, self._backend.max_seq_len - len(context_ids) - 1)
        if request.tree.is_chain and request.tree.num_nodes > room:
            request = replace(request, tree=TokenTree.chain(request.tree.tokens[: max(room, 0)]))
        return Asked(step_tensors(request, context_ids, self._backend), request)

    def answer(self, request: StepRequest, context_ids: IdArray, responses: Sequence[Incoming]) -> Acceptance:
        """Return what the step decided."""
        return accepted(responses, request.tree, context_ids, self._backend)


class DraftDesk:
    """Answers draft calls, greedily at any temperature; implements `runtime.trtllm_backend.line.Desk`."""

    def __init__(self, backend: Backend, shares_blocks: bool) -> None:
        self._backend = backend
        self._shares_blocks = shares_blocks

    def ask(self, request: DraftRequest, context_ids: IdArray) -> Asked[DraftRequest] | Drafted:
        """Return the call, or a bare root where no draft fits."""
        _check_salt(request.delta, self._shares_blocks)
        length = min(request.max_nodes, request.max_depth, self._backend.max_seq_len - len(context_ids))
        if length < 1:
            return Drafted(TokenTree.bare())
        return Asked(draft_tensors(context_ids, length, self._backend), request)

    def answer(self, request: DraftRequest, context_ids: IdArray, responses: Sequence[Incoming]) -> Drafted:
        """Return the chain of the new tokens."""
        return Drafted(TokenTree.chain(new_tokens(responses, context_ids, self._backend)))


def _check_salt(delta: Delta, shares_blocks: bool) -> None:
    if delta.cache_salt and shares_blocks:
        raise RequestError(
            "cache_salt keeps the KV blocks of some requests from others, which NVIDIA's backend has no tensor for "
            "(input cache_salt; engine = 'tensorrt_llm' has it)"
        )
