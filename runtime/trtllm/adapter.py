"""What the desks of one executor share: what they are made of, the checks, the tokens of a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from hashlib import blake2b
from typing import Any

from orchestrator.core.errors import EngineError, RequestError
from orchestrator.core.types import Acceptance
from orchestrator.deployment.capabilities import Capabilities
from orchestrator.deployment.engine_manifest import Manifest
from orchestrator.wire.target import StepRequest
from runtime.engine.calls import EngineCall
from runtime.trtllm.executor.library import Library
from runtime.trtllm.in_flight import EngineRequest


class TargetAdapter(ABC):
    """Answers target steps; implements `runtime.trtllm.in_flight.Adapter`."""

    def __init__(self, library: Library, manifest: Manifest, capabilities: Capabilities) -> None:
        self._api = library.api
        self._manifest = manifest
        self._capabilities = capabilities

    def ask(self, job: EngineCall[StepRequest], ids: list[int]) -> EngineRequest:
        """Return the executor's request; raises RequestError for what it cannot serve."""
        self._check_step(job.request)
        self._check_length(ids)
        return self._asked(job, ids, len(ids) - job.delta.prompt_len)

    @abstractmethod
    def answer(self, job: EngineCall[StepRequest], asked: EngineRequest, results: list[Any]) -> Acceptance:
        """Return what the results mean; raises EngineError when they mean nothing."""

    @abstractmethod
    def _asked(self, job: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        """Return the executor's request; num_output: tokens of `ids` that are output."""

    def _check_step(self, request: StepRequest) -> None:
        branches = "" if request.tree.is_chain else "siblings in its tree"
        if refusal := self._capabilities.refusal(request.sampling, request.options, branches=branches):
            raise RequestError(refusal)

    def _check_length(self, ids: list[int]) -> None:
        """Raise RequestError when the engine has no room for the context and one token behind it."""
        longest = min(self._manifest.max_input_len, self._manifest.max_seq_len - 1)
        if len(ids) > longest:
            raise RequestError(f"the text so far has {len(ids)} tokens, the engine was built for at most {longest}")


def new_tokens(asked: EngineRequest, result: Any, vocab_size: int) -> list[int]:
    """Return the tokens behind the input, with which a result begins; raises EngineError when they mean nothing."""
    output: list[int] = list(result.output_token_ids[0])
    if not output:
        raise without_token(result)
    if output[: len(asked.ids)] != asked.ids or len(output) == len(asked.ids):
        raise EngineError(
            f"TensorRT-LLM answered {len(output)} tokens, which are not the {len(asked.ids)} of the input and new ones"
        )
    return checked_tokens(output[len(asked.ids) :], asked.length, vocab_size)


def checked_tokens(tokens: list[int], most: int, vocab_size: int) -> list[int]:
    """Return tokens that are what was asked for; raises EngineError for too many, or such as no token is."""
    if len(tokens) > most:
        raise EngineError(f"TensorRT-LLM answered {len(tokens)} new tokens, at most {most} were asked for")
    if odd := [token for token in tokens if not 0 <= token < vocab_size]:
        raise EngineError(f"TensorRT-LLM answered the token {odd[0]}, outside of 0..{vocab_size - 1}")
    return tokens


def without_token(result: Any) -> EngineError:
    """Return the error of a result that has no token."""
    reasons = ", ".join(str(reason) for reason in result.finish_reasons)
    return EngineError(f"TensorRT-LLM ended the request without a token ({reasons})")


def salt_of(cache_salt: str) -> dict[str, int]:
    """Return the argument that keeps requests of different salts from sharing KV blocks."""
    if not cache_salt:
        return {}
    digest = blake2b(cache_salt.encode(), digest_size=8).digest()
    return {"cache_salt_id": int.from_bytes(digest) >> 1}  # 63 bits fit any 64-bit integer
