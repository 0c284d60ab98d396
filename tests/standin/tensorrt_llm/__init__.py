"""NOT TensorRT-LLM: a stand-in with the part of its surface that runtime/trtllm uses, for tests without a GPU.

Names, arguments and assertions are those of the project's facts about the library (bindings of 1.1 to 1.2), not of the
library itself; an "engine" here is a folder whose rank file names a checkpoint. Not in the facts, inferred: argument
names of SamplingConfig, OutputConfig, KvCacheConfig and ExecutorConfig; `has_error()`, `error_msg`, `request_id` and
`result` of Response; that top_k 1 is greedy; that a result begins with the input; which errors are raised by
enqueue_request; that a cancelled request is answered by an empty final response through this door, too.
"""

__version__ = "1.2.1"
