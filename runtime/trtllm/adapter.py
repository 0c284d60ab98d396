"""The base of all adapters, which turn a call into the engine's request and the engine's results into the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from orchestrator.core.errors import EngineError
from runtime.engine.calls import Answer, EngineCall, Request


@dataclass(eq=False)
class Stream:
    """A request whose tokens the engine sends pass by pass; tokens beyond one call's answer wait for the next call.

    key: the options that a later call must share to continue the stream. room: how many tokens may still come.
    num_passes, num_drafted: passes and draft tokens already reported to calls.
    """

    key: object
    room: int
    num_passes: int = 0
    num_drafted: int = 0


class EngineRequest(NamedTuple):
    """A call as it is sent to the engine.

    payload: in the transport's own type. ids: the committed context, followed by the stream's tokens that calls have
    received. length: the most tokens that the answer may have. drafts: the draft tokens to verify. stream: None when
    one final response answers the request.
    """

    payload: Any
    ids: list[int]
    length: int
    drafts: Sequence[int] = ()
    stream: Stream | None = None


class Adapter(ABC, Generic[Request]):
    """Translates between calls and one kind of engine; holds no state of any request."""

    @abstractmethod
    def to_request(self, call: EngineCall[Request], ids: list[int]) -> EngineRequest | Answer:
        """Return the engine's request, or the answer when the engine is not needed for it.

        ids: the whole committed context. Raises ServingError to refuse the call.
        """

    @abstractmethod
    def from_result(self, call: EngineCall[Request], request: EngineRequest, results: list[Any]) -> Answer:
        """Return the answer to a call; raises EngineError when the results do not fit the request.

        results: exactly one, unless the request is a stream.
        """


def check_tokens(tokens: list[int], most: int, vocab_size: int) -> list[int]:
    """Return `tokens`; raises EngineError when there are more than `most` or one is outside the vocabulary."""
    if len(tokens) > most:
        raise EngineError(f"TensorRT-LLM answered {len(tokens)} new tokens, at most {most} were requested")
    if invalid := [token for token in tokens if not 0 <= token < vocab_size]:
        raise EngineError(f"TensorRT-LLM answered the token {invalid[0]}, outside of 0..{vocab_size - 1}")
    return tokens


def generated_tokens(request: EngineRequest, result: Any, vocab_size: int) -> list[int]:
    """Return the tokens after the input, which a result repeats; raises EngineError when there are none."""
    output: list[int] = list(result.output_token_ids[0])
    if not output:
        raise no_token_error(result)
    if output[: len(request.ids)] != request.ids or len(output) == len(request.ids):
        raise EngineError(
            f"TensorRT-LLM answered {len(output)} tokens, which are not the {len(request.ids)} of the input and more"
        )
    return check_tokens(output[len(request.ids) :], request.length, vocab_size)


def streamed_tokens(results: list[Any], most: int, vocab_size: int) -> list[int]:
    """Return the tokens of a stream's results, which do not repeat the input; errors as in `generated_tokens`."""
    tokens: list[int] = [token for result in results for token in result.output_token_ids[0]]
    if not tokens:
        raise no_token_error(results[-1])
    return check_tokens(tokens, most, vocab_size)


def no_token_error(result: Any) -> EngineError:
    """Return the error of a result without a token."""
    reasons = ", ".join(str(reason) for reason in result.finish_reasons)
    return EngineError(f"TensorRT-LLM ended the request without a token ({reasons})")
