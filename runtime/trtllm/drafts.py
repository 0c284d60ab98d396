"""A draft call as one request of the executor: the greedy continuation of the context."""

from __future__ import annotations

from typing import Any

from orchestrator.engine_manifest import Manifest
from orchestrator.tree import TokenTree
from orchestrator.types import Drafted
from orchestrator.wire import DraftRequest
from runtime.job import Job
from runtime.trtllm.desk import new_tokens, salt_of
from runtime.trtllm.flights import Asked
from runtime.trtllm.library import Library


class DraftDesk:
    """Answers draft calls; implements `runtime.trtllm.flights.Desk`.

    It drafts greedily at any temperature: target and draft model have each its own random numbers, and of all drafts
    the likeliest token is the one that the target's draw matches most often.
    """

    def __init__(self, library: Library, manifest: Manifest) -> None:
        self._api = library.api
        self._manifest = manifest

    def ask(self, job: Job[DraftRequest], ids: list[int]) -> Asked | Drafted:
        """Return the executor's request, or a bare root where no draft fits."""
        room = self._manifest.max_seq_len - len(ids)
        length = min(job.request.max_nodes, job.request.max_depth, room)
        if length < 1 or len(ids) > self._manifest.max_input_len:
            return Drafted(TokenTree.bare())
        greedy = self._api.SamplingConfig(top_k=1)
        request = self._api.Request(ids, length, sampling_config=greedy, **salt_of(job.delta.cache_salt))
        return Asked(request, ids, length)

    def answer(self, job: Job[DraftRequest], asked: Asked, results: list[Any]) -> Drafted:
        """Return the chain of the new tokens."""
        (result,) = results
        return Drafted(TokenTree.chain(new_tokens(asked, result, self._manifest.vocab_size)))
