"""NOT TensorRT-LLM: the part of its module `tensorrt_llm.llmapi` that runtime/trtllm/llm_api uses, as documented for 1.2."""

from tensorrt_llm.bindings._configs import KvCacheConfig
from tensorrt_llm.llmapi._llm import LLM
from tensorrt_llm.llmapi._params import (
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    EagleDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)

__all__ = [
    "LLM", "DraftTargetDecodingConfig", "Eagle3DecodingConfig", "EagleDecodingConfig", "KvCacheConfig",
    "LookaheadDecodingConfig", "MTPDecodingConfig", "MedusaDecodingConfig", "NGramDecodingConfig", "SamplingParams",
]  # fmt: skip
