"""NOT TensorRT-LLM: the names of its module `tensorrt_llm.bindings.executor` that runtime/trtllm uses."""

from tensorrt_llm.bindings._configs import (
    CommunicationMode,
    CommunicationType,
    DecodingConfig,
    DecodingMode,
    EagleConfig,
    ExecutorConfig,
    ExternalDraftTokensConfig,
    KvCacheConfig,
    LookaheadDecodingConfig,
    ModelType,
    OrchestratorConfig,
    OutputConfig,
    ParallelConfig,
    Request,
    SamplingConfig,
)
from tensorrt_llm.bindings._executor import Executor
from tensorrt_llm.bindings._results import FinishReason, Response, Result, SpeculativeDecodingMetrics

__all__ = [
    "CommunicationMode", "CommunicationType", "OrchestratorConfig", "ParallelConfig",
    "DecodingConfig", "DecodingMode", "EagleConfig", "Executor", "ExecutorConfig", "ExternalDraftTokensConfig",
    "FinishReason", "KvCacheConfig", "LookaheadDecodingConfig", "ModelType", "OutputConfig", "Request", "Response",
    "Result", "SamplingConfig", "SpeculativeDecodingMetrics",
]  # fmt: skip
