"""Engines that draft by themselves (Medusa, EAGLE, ReDrafter, Lookahead): a step is a burst of their own iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.capabilities import Capabilities
from orchestrator.engine_manifest import Manifest
from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance
from orchestrator.wire import StepRequest
from runtime.job import Job
from runtime.trtllm.library import Library
from runtime.trtllm.line import Asked
from runtime.trtllm.sampling import sampling_config
from runtime.trtllm.steps import check_length, check_step, new_tokens, salt_of

#: Most tokens of a burst. Each begins with an iteration that reads the context's end anew and has no drafts, and what a
#: burst has behind a stop is thrown away.
BURST = 16


@dataclass(frozen=True, eq=False)
class Burst(Acceptance):
    """An acceptance of which the engine has committed more tokens than drafts were sent.

    extra: tokens before next_token, drafted and verified inside the engine. num_iterations: forward passes behind them.
    """

    extra: tuple[int, ...] = ()
    num_iterations: int = 1

    def tokens(self, tree: TokenTree) -> list[int]:
        """Return the tokens that this step commits."""
        return [*self.extra, self.next_token]


class InsideDesk:
    """Answers target steps with bursts; implements `runtime.trtllm.line.Desk`. The server's own drafts are ignored.

    Law: at temperature 0, which is all that it serves, the text is the target's; acceptance length = tokens per
    iteration, of which the executor tells the number.
    """

    def __init__(self, library: Library, manifest: Manifest, capabilities: Capabilities) -> None:
        self._api = library.api
        self._manifest = manifest
        self._capabilities = capabilities

    def ask(self, job: Job[StepRequest], ids: list[int]) -> Asked:
        """Return the executor's request; raises RequestError for what it cannot serve."""
        check_step(job.request, self._capabilities)
        check_length(ids, self._manifest)
        length = min(BURST, self._manifest.max_seq_len - len(ids))
        config = sampling_config(self._api, job.request.sampling, len(ids), len(ids) - job.delta.prompt_len)
        request = self._api.Request(ids, length, sampling_config=config, **salt_of(job.delta.cache_salt))
        return Asked(request, ids, [])

    def answer(self, job: Job[StepRequest], asked: Asked, result: Any) -> Burst:
        """Return all that the burst has brought."""
        *extra, last = new_tokens(asked, result)
        return Burst((), last, extra=tuple(extra), num_iterations=result.decoding_iter)
