"""A draft call as one request of the executor: the greedy continuation of the context."""

from __future__ import annotations

from typing import Any

from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse
from orchestrator.deployment.engine_manifest import Manifest
from orchestrator.wire.drafter import DraftRequest
from runtime.engine.calls import EngineCall
from runtime.trtllm.adapter import new_tokens, salt_of
from runtime.trtllm.executor.library import Library
from runtime.trtllm.in_flight import EngineRequest


class DraftAdapter:
    """Answers draft calls; implements `runtime.trtllm.in_flight.Adapter`.

    It drafts greedily at any temperature: target and draft model have each its own random numbers, and of all drafts
    the likeliest token is the one that the target's draw matches most often.
    """

    def __init__(self, library: Library, manifest: Manifest) -> None:
        self._api = library.api
        self._manifest = manifest

    def ask(self, job: EngineCall[DraftRequest], ids: list[int]) -> EngineRequest | DraftResponse:
        """Return the executor's request, or a bare root where no draft fits."""
        room = self._manifest.max_seq_len - len(ids)
        length = min(job.request.max_nodes, job.request.max_depth, room)
        if length < 1 or len(ids) > self._manifest.max_input_len:
            return DraftResponse(TokenTree.bare())
        greedy = self._api.SamplingConfig(top_k=1)
        request = self._api.Request(ids, length, sampling_config=greedy, **salt_of(job.delta.cache_salt))
        return EngineRequest(request, ids, length)

    def answer(self, job: EngineCall[DraftRequest], asked: EngineRequest, results: list[Any]) -> DraftResponse:
        """Return the chain of the new tokens."""
        (result,) = results
        return DraftResponse(TokenTree.chain(new_tokens(asked, result, self._manifest.vocab_size)))
