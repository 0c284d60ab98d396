"""The tensors of NVIDIA's Triton model `tensorrt_llm`, as its configuration declares them: a table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.core.errors import ConfigError


@dataclass(frozen=True)
class Tensor:
    """An input or output; dims: without the batch dimension.

    is_scalar: dims are [1], which Triton drops for the backend. is_ragged: requests of different lengths may share a
    batch.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    is_optional: bool = True
    is_ragged: bool = False
    is_scalar: bool = False


#: Data type, then the dims.
_Declared = tuple[str, *tuple[int, ...]]
_REQUIRED = ("input_lengths", "request_output_len")
_SCALARS = {
    "INT32": (
        *_REQUIRED,
        *("end_id", "pad_id", "beam_width", "num_return_sequences", "min_tokens"),
        *("runtime_top_k", "runtime_top_p_reset_ids"),
        *("encoder_output_lengths", "decoder_input_lengths", "prompt_vocab_size"),
    ),
    "UINT64": ("seed", "lora_task_id"),
    "FP32": (
        *("temperature", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay", "beam_search_diversity_rate"),
        *("len_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty", "draft_acceptance_threshold"),
    ),
    "BOOL": (
        *("early_stopping", "exclude_input_in_output", "stop", "streaming"),
        *("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics"),
        *("return_num_input_tokens", "return_num_output_tokens"),
    ),
}
# The engines are built with logits in float32. The type of the two embeddings is inferred; our plans do not use them.
LOGITS = "FP32"
_RAGGED: dict[str, _Declared] = {
    "input_ids": ("INT32", -1),
    "draft_input_ids": ("INT32", -1),
    "draft_logits": (LOGITS, -1, -1),
    "decoder_input_ids": ("INT32", -1),
    "encoder_input_features": ("FP16", -1, -1),
    "stop_words_list": ("INT32", 2, -1),
    "bad_words_list": ("INT32", 2, -1),
    "embedding_bias": ("FP32", -1),
    "prompt_embedding_table": ("FP16", -1, -1),
    "prompt_table_extra_ids": ("UINT64", -1),
    "cross_attention_mask": ("BOOL", -1, -1),
    "skip_cross_attn_blocks": ("BOOL", 1),
    "lora_weights": ("FP16", -1, -1),
    "lora_config": ("INT32", -1, 3),
    "context_phase_params": ("UINT8", -1),
    "retention_token_range_starts": ("INT32", -1),
    "retention_token_range_ends": ("INT32", -1),
    "retention_token_range_priorities": ("INT32", -1),
    "retention_token_range_durations_ms": ("INT32", -1),
    "retention_decode_priority": ("INT32", 1),
    "retention_decode_duration_ms": ("INT32", 1),
    "guided_decoding_guide_type": ("STRING", 1),
    "guided_decoding_guide": ("STRING", 1),
    "lookahead_window_size": ("INT32", 1),
    "lookahead_ngram_size": ("INT32", 1),
    "lookahead_verification_set_size": ("INT32", 1),
}
_PLAIN: dict[str, _Declared] = {"mrope_rotary_cos_sin": ("FP32", -1), "mrope_position_deltas": ("INT64", 1)}
_OUTPUTS: dict[str, _Declared] = {
    "output_ids": ("INT32", -1, -1),
    "sequence_length": ("INT32", -1),
    "cum_log_probs": ("FP32", -1),
    "output_log_probs": ("FP32", -1, -1),
    "context_logits": (LOGITS, -1, -1),
    "generation_logits": (LOGITS, -1, -1, -1),
    "batch_index": ("INT32", 1),
    "sequence_index": ("INT32", 1),
    "context_phase_params": ("UINT8", -1),
    "kv_cache_alloc_new_blocks": ("INT32", 1),
    "kv_cache_reused_blocks": ("INT32", 1),
    "kv_cache_alloc_total_blocks": ("INT32", 1),
    "arrival_time_ns": ("INT64", 1),
    "first_scheduled_time_ns": ("INT64", 1),
    "first_token_time_ns": ("INT64", 1),
    "last_token_time_ns": ("INT64", 1),
    "acceptance_rate": ("FP32", 1),
    "total_accepted_draft_tokens": ("INT32", 1),
    "total_draft_tokens": ("INT32", 1),
    "num_input_tokens": ("INT32", 1),
    "num_output_tokens": ("INT32", 1),
}
#: The differences in 0.19, the oldest release whose names are known.
_OLD_NAMES = {"min_tokens": "min_length", "seed": "random_seed"}
_SINCE_1 = ("return_num_input_tokens", "return_num_output_tokens", "num_input_tokens", "num_output_tokens")
_OLD, _NEW = ("0.19.0",), ("1.0.0", "1.1.0", "1.2.0", "1.2.1")


def inputs(version: str) -> list[Tensor]:
    """Return the inputs of a release; raises ConfigError when its names are not known."""
    tensors = [
        Tensor(name, data_type, (1,), is_optional=name not in _REQUIRED, is_scalar=True)
        for data_type, names in _SCALARS.items()
        for name in names
    ]
    tensors += [Tensor(name, data_type, tuple(dims), is_ragged=True) for name, (data_type, *dims) in _RAGGED.items()]
    tensors += [Tensor(name, data_type, tuple(dims)) for name, (data_type, *dims) in _PLAIN.items()]
    return _of_release(tensors, version)


def outputs(version: str) -> list[Tensor]:
    """Return the outputs of a release; raises ConfigError when its names are not known."""
    tensors = [Tensor(name, data_type, tuple(dims)) for name, (data_type, *dims) in _OUTPUTS.items()]
    return _of_release(tensors, version)


def _of_release(tensors: list[Tensor], version: str) -> list[Tensor]:
    if version in _NEW:
        return tensors
    if version not in _OLD:
        raise ConfigError(
            f"the tensors of TensorRT-LLM {version}'s backend are not known here "
            f"(known: {', '.join((*_OLD, *_NEW))}; key trtllm_version)"
        )
    older = [tensor for tensor in tensors if tensor.name not in _SINCE_1]
    return [replace(tensor, name=_OLD_NAMES.get(tensor.name, tensor.name)) for tensor in older]
