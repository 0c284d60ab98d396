"""NOT TensorRT-LLM: the names of its module `tensorrt_llm.runtime` that runtime/trtllm/trees uses."""

from tensorrt_llm.runtime._session import Session, TensorInfo

__all__ = ["Session", "TensorInfo"]
