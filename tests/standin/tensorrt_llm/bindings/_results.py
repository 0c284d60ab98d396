"""NOT TensorRT-LLM: what its executor answers with; the fields are those of executor/types.h and executor.h."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class FinishReason(Enum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


@dataclass
class SpeculativeDecodingMetrics:
    acceptance_rate: float
    total_accepted_draft_tokens: int
    total_draft_tokens: int


@dataclass
class RequestPerfMetrics:
    speculative_decoding: SpeculativeDecodingMetrics


@dataclass
class Result:
    """generation_logits: [beam, n, Vpad], or [1, beam, Vpad] per streaming step; the others per beam."""

    is_final: bool
    output_token_ids: list[list[int]]
    cum_log_probs: Any = None
    log_probs: Any = None
    context_logits: Any = None
    generation_logits: Any = None
    spec_dec_fast_logits_info: Any = None
    encoder_output: Any = None
    finish_reasons: list[FinishReason] = field(default_factory=lambda: [FinishReason.NOT_FINISHED])
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    avg_decoded_tokens_per_iter: float | None = None
    context_phase_params: Any = None
    request_perf_metrics: RequestPerfMetrics | None = None
    additional_outputs: Any = None


@dataclass
class Response:
    """Either a result or an error; which of the two, `has_error` says."""

    request_id: int
    _result: Result | None = None
    _error: str = ""

    def has_error(self):
        return bool(self._error)

    @property
    def error_msg(self):
        if not self._error:
            raise RuntimeError("this response has no error")
        return self._error

    @property
    def result(self):
        if self._result is None:
            raise RuntimeError("this response has no result")
        return self._result
