"""Target steps and drafts as calls to NVIDIA's backend; a long chain is cut, anything else it lacks is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchestrator.core.arrays import IdArray, Incoming
from orchestrator.core.deployment.engine_trees import lookahead_nodes, sizes_refusal
from orchestrator.core.errors import EngineError, RequestError
from orchestrator.core.messages.context import Delta
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, DraftResponse, EngineSpeculationResult
from runtime.engine.calls import EngineCall, Request
from runtime.trtllm.adapter import Adapter, EngineRequest
from runtime.trtllm.backend.tensors import (
    ACCEPTED,
    DRAFTED,
    OUTPUTS,
    Backend,
    draft_tensors,
    engine_side_tensors,
    read_acceptance,
    read_tokens,
    step_tensors,
)
from runtime.trtllm.backend.transport import ModelInput

#: The most tokens of one call to an engine that drafts by itself.
MAX_LENGTH = 32


class BackendAdapter(Adapter[Request]):
    """What the adapters of this backend share.

    shares_blocks: whether the engine lets any request reuse the KV blocks of any other.
    """

    def __init__(self, backend: Backend, shares_blocks: bool) -> None:
        self._backend = backend
        self._shares_blocks = shares_blocks

    def _check_salt(self, delta: Delta) -> None:
        if delta.cache_salt and self._shares_blocks:
            raise RequestError(
                "cache_salt keeps the KV blocks of some requests from others, which NVIDIA's backend has no tensor for "
                "(input cache_salt; engine = 'tensorrt_llm' has it)"
            )


class StepAdapter(BackendAdapter[StepRequest]):
    """Sends each step as one call, with the chain as draft tokens."""

    def to_request(self, call: EngineCall[StepRequest], ids: list[int]) -> EngineRequest:
        """Return the backend's request; a chain is cut to the length that the engine has room for."""
        self._check_salt(call.delta)
        request = call.request
        room = max(min(self._backend.max_draft_len, self._backend.max_seq_len - len(ids) - 1), 0)
        if request.tree.is_chain:
            request = replace(request, tree=TokenTree.chain(request.tree.tokens[:room]))
        payload = ModelInput(step_tensors(request, _array(ids), self._backend))
        drafts = request.tree.tokens.tolist()
        return EngineRequest(payload, ids, len(drafts) + 1, drafts)

    def from_result(self, call: EngineCall[StepRequest], request: EngineRequest, results: list[Any]) -> Acceptance:
        """Return what the step accepted."""
        return read_acceptance(results[0], request.drafts, _array(request.ids), self._backend)


class EngineSideAdapter(BackendAdapter[StepRequest]):
    """Answers target steps of an engine that drafts by itself, up to MAX_LENGTH tokens a call.

    The first pass of a call recomputes the end of the context and has no drafts; tokens after a stop are dropped.
    Invariant: at temperature 0, the only temperature served, the text is the target's.
    """

    def __init__(
        self, backend: Backend, shares_blocks: bool, method: str, num_nodes: int, sizes: tuple[int, ...] = ()
    ) -> None:
        """num_nodes: draft tokens per pass. sizes: the engine's Lookahead sizes; a request may have smaller ones."""
        super().__init__(backend, shares_blocks)
        self._method = method
        self._num_nodes = num_nodes
        self._sizes = sizes

    def to_request(self, call: EngineCall[StepRequest], ids: list[int]) -> EngineRequest:
        """Return the backend's request; a step without engine-side speculation asks for one token."""
        self._check_salt(call.delta)
        speculation = call.request.options.engine_speculation
        if speculation and speculation.choices:
            raise RequestError("NVIDIA's backend has no tensor for choices; its configuration has the engine's tree")
        if speculation and speculation.sizes and (refusal := sizes_refusal(speculation.sizes, self._sizes)):
            raise RequestError(refusal)
        length = min(speculation.length, MAX_LENGTH, self._backend.max_seq_len - len(ids)) if speculation else 1
        tensors = engine_side_tensors(call.request, _array(ids), length, self._backend)
        return EngineRequest(ModelInput(tensors, (*OUTPUTS, ACCEPTED, DRAFTED)), ids, length)

    def from_result(self, call: EngineCall[StepRequest], request: EngineRequest, results: list[Any]) -> Acceptance:
        """Return the tokens; every token that the engine did not count as an accepted draft is taken as one pass."""
        (answer,) = results
        tokens = read_tokens(answer, _array(request.ids), self._backend)
        if not tokens:
            raise EngineError("the backend answered no new token")
        speculation = call.request.options.engine_speculation
        if speculation is None:
            return Acceptance((), tokens[0])
        # The first pass has no drafts, so its one token and the last pass's bonus token are never accepted drafts.
        num_passes = len(tokens) - min(_count(answer, ACCEPTED), max(len(tokens) - 2, 0))
        lengths = (len(tokens) - num_passes + 1, *[1] * (num_passes - 1))
        # DRAFTED counts only a drafted path, not all nodes of its tree; 0 means that nothing was drafted at all.
        num_asked = lookahead_nodes(*speculation.sizes) if speculation.sizes else self._num_nodes
        num_nodes = num_asked if _count(answer, DRAFTED) else 0
        result = EngineSpeculationResult(self._method, tuple(tokens[:-1]), lengths, (num_passes - 1) * num_nodes)
        return Acceptance((), tokens[-1], engine_speculation=result)


class DraftAdapter(BackendAdapter[DraftRequest]):
    """Answers draft calls with the greedy continuation of the context, at any temperature."""

    def to_request(self, call: EngineCall[DraftRequest], ids: list[int]) -> EngineRequest | DraftResponse:
        """Return the backend's request, or a bare root when no draft fits."""
        self._check_salt(call.delta)
        length = min(call.request.max_nodes, call.request.max_depth, self._backend.max_seq_len - len(ids))
        if length < 1:
            return DraftResponse(TokenTree.bare())
        return EngineRequest(ModelInput(draft_tensors(_array(ids), length, self._backend)), ids, length)

    def from_result(self, call: EngineCall[DraftRequest], request: EngineRequest, results: list[Any]) -> DraftResponse:
        """Return the new tokens as a chain."""
        return DraftResponse(TokenTree.chain(read_tokens(results[0], _array(request.ids), self._backend)))


def _array(ids: Sequence[int]) -> IdArray:
    return np.array(ids, np.int32)


def _count(answer: Incoming, name: str) -> int:
    """Return one of the engine's counters, 0 if absent: it is not known which kinds of engines have them."""
    return max(int(answer[name].reshape(-1)[0]), 0) if name in answer and answer[name].size else 0
