"""NOT TensorRT-LLM: a stand-in with the part of its surface that runtime/trtllm uses, for tests without a GPU.

Names, arguments and assertions are those of the project's facts about the library (bindings of 1.1 to 1.2), not of the
library itself; an "engine" here is a folder whose rank file names a checkpoint. Not in the facts, but in NVIDIA's public
tests and examples of these bindings: argument names of SamplingConfig, OutputConfig, KvCacheConfig, ParallelConfig and
OrchestratorConfig; that a DecodingMode is made by a call; that a result begins with the input, but never while
streaming. Inferred: `has_error()`, `error_msg`, `request_id` and `result` of Response; that top_k 1 is greedy; which
errors are raised by enqueue_request; that a cancelled request is answered by an empty final response through this door,
too; that `decoding_iter` counts a request's passes; that ranks are spawned from a process that mpirun has not started.
"""

__version__ = "1.2.1"
