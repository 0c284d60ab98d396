"""NOT TensorRT-LLM: its configuration objects; a wrong type is a TypeError, a broken assertion a RuntimeError."""

import functools
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch


class ModelType(Enum):
    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class CommunicationType(Enum):
    MPI = 0


class CommunicationMode(Enum):
    LEADER = 0
    ORCHESTRATOR = 1


@dataclass(frozen=True)
class DecodingMode:
    """Made by its static methods: `DecodingMode.Medusa()`."""

    name: str


for name in ("Auto", "TopK", "TopP", "TopKTopP", "BeamSearch", "Medusa", "Lookahead", "ExplicitDraftTokens", "Eagle"):
    setattr(DecodingMode, name, staticmethod(functools.partial(DecodingMode, name)))


def check(condition, words):
    """Raise as the library's assertions do."""
    if not condition:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {words}")


def typed(name, value, *kinds):
    """Return `value` if it is None or of one of the kinds; a whole number is a float, a bool is no number."""
    kinds = (*kinds, int) if float in kinds else kinds
    if value is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
        return value
    raise TypeError(f"incompatible constructor arguments: {name} = {value!r}")


def ids(name, value):
    """Return a list of integers, or None."""
    if value is not None and not (isinstance(value, list) and all(type(item) is int for item in value)):
        raise TypeError(f"incompatible constructor arguments: {name} must be list[int], got {value!r}")
    return value


def id_lists(name, value):
    """Return a list of lists of integers, or None."""
    for row in typed(name, value, list) or []:
        if row is None:
            raise TypeError(f"incompatible constructor arguments: {name} = {value!r}")
        ids(name, row)
    return value


class SamplingConfig:
    """Checks of executor/samplingConfig.cpp; the seed's range is that of its C++ type, uint64."""

    def __init__(
        self,
        beam_width=1,
        *,
        top_k=None,
        top_p=None,
        seed=None,
        temperature=None,
        min_tokens=None,
        repetition_penalty=None,
        presence_penalty=None,
        frequency_penalty=None,
    ):
        self.beam_width = typed("beam_width", beam_width, int)
        self.top_k = typed("top_k", top_k, int)
        self.top_p = typed("top_p", top_p, float)
        self.seed = typed("seed", seed, int)
        self.temperature = typed("temperature", temperature, float)
        self.min_tokens = typed("min_tokens", min_tokens, int)
        self.repetition_penalty = typed("repetition_penalty", repetition_penalty, float)
        self.presence_penalty = typed("presence_penalty", presence_penalty, float)
        self.frequency_penalty = typed("frequency_penalty", frequency_penalty, float)
        if seed is not None and not 0 <= seed < 1 << 64:
            raise TypeError(f"incompatible constructor arguments: seed = {seed}")
        check(top_k is None or top_k >= 0, f"top_k {top_k} < 0")
        check(top_p is None or 0 < top_p <= 1, f"top_p {top_p} outside of (0, 1]")
        check(temperature is None or temperature >= 0, f"temperature {temperature} < 0")
        check(min_tokens is None or min_tokens >= 0, f"min_tokens {min_tokens} < 0")
        check(repetition_penalty is None or repetition_penalty > 0, f"repetition_penalty {repetition_penalty} <= 0")
        if presence_penalty or frequency_penalty:
            raise NotImplementedError("this stand-in has no presence or frequency penalty")

    @property
    def greedy(self):
        """Inferred: top_k 1, or neither top_k nor top_p, is the argmax."""
        return self.top_k == 1 or (self.top_k is None and self.top_p is None)


class OutputConfig:
    """Arguments of nanobind/executor/request.cpp."""

    def __init__(
        self,
        return_log_probs=False,
        return_context_logits=False,
        return_generation_logits=False,
        *,
        return_perf_metrics=False,
    ):
        self.return_log_probs = typed("return_log_probs", return_log_probs, bool)
        self.return_context_logits = typed("return_context_logits", return_context_logits, bool)
        self.return_generation_logits = typed("return_generation_logits", return_generation_logits, bool)
        self.return_perf_metrics = typed("return_perf_metrics", return_perf_metrics, bool)


class ExternalDraftTokensConfig:
    """Checks of executor/decodingConfig.cpp."""

    def __init__(self, tokens, logits=None, acceptance_threshold=None, fast_logits=None):
        self.tokens = ids("tokens", tokens)
        self.logits = typed("logits", logits, torch.Tensor)
        self.acceptance_threshold = typed("acceptance_threshold", acceptance_threshold, float)
        self.fast_logits = typed("fast_logits", fast_logits, bool)
        check(tokens, "!mTokens.empty()")
        check(logits is None or (logits.ndim == 2 and len(logits) == len(tokens)), "logits are [n, V]")
        check(acceptance_threshold is None or 0 < acceptance_threshold <= 1, "threshold in (0, 1]")


class LookaheadDecodingConfig:
    """(1, 1, 0) = off; the smallest useful one is (2, 2, 1). executor/decodingConfig.cpp."""

    def __init__(self, max_window_size=4, max_ngram_size=3, max_verification_set_size=4):
        names = ("max_window_size", "max_ngram_size", "max_verification_set_size")
        self.triple = (max_window_size, max_ngram_size, max_verification_set_size)
        for name, value in zip(names, self.triple, strict=True):
            setattr(self, name, typed(name, value, int))
        small = self.triple != (1, 1, 0) and any(x < least for x, least in zip(self.triple, (2, 2, 1), strict=True))
        check(not small, f"lookahead {self.triple} is less than (2, 2, 1)")

    @property
    def draft_len(self):
        """Draft tokens that it needs: (N == 1 ? 0 : N - 2) + (W - 1 + G)(N - 1)."""
        w, n, g = self.triple
        return (0 if n == 1 else n - 2) + (w - 1 + g) * (n - 1)

    def covers(self, other):
        """True when a request with `other` may run on an engine with this."""
        return all(mine >= asked for mine, asked in zip(self.triple, other.triple, strict=True))


class EagleConfig:
    """Checks of executor/decodingConfig.cpp."""

    def __init__(
        self,
        eagle_choices=None,
        greedy_sampling=True,
        posterior_threshold=None,
        use_dynamic_tree=False,
        dynamic_tree_max_topK=None,  # noqa: N803
    ):
        self.eagle_choices = id_lists("eagle_choices", eagle_choices)
        self.greedy_sampling = typed("greedy_sampling", greedy_sampling, bool)
        self.posterior_threshold = typed("posterior_threshold", posterior_threshold, float)
        self.use_dynamic_tree = typed("use_dynamic_tree", use_dynamic_tree, bool)
        self.dynamic_tree_max_topK = typed("dynamic_tree_max_topK", dynamic_tree_max_topK, int)
        check(posterior_threshold is None or 0 <= posterior_threshold < 1, "posterior threshold in [0, 1)")
        check(not (use_dynamic_tree and eagle_choices), "eagle choices should not be set when dynamic tree is enabled")


class DecodingConfig:
    """Each configuration needs its mode beside it: executor/decodingConfig.cpp."""

    def __init__(self, decoding_mode=None, lookahead_decoding_config=None, medusa_choices=None, eagle_config=None):
        self.decoding_mode = typed("decoding_mode", decoding_mode, DecodingMode)
        self.lookahead_decoding_config = typed(
            "lookahead_decoding_config", lookahead_decoding_config, LookaheadDecodingConfig
        )
        self.medusa_choices = id_lists("medusa_choices", medusa_choices)
        self.eagle_config = typed("eagle_config", eagle_config, EagleConfig)
        for name, value in (
            ("Lookahead", lookahead_decoding_config),
            ("Medusa", medusa_choices),
            ("Eagle", eagle_config),
        ):
            check(
                value is None or decoding_mode == DecodingMode(name), f"{name} is configured, but not the DecodingMode"
            )


class KvCacheConfig:
    """Defaults of executor/executor.h: blocks are reused, partly matching ones too."""

    def __init__(self, enable_block_reuse=True, max_tokens=None, *, enable_partial_reuse=True):
        self.enable_block_reuse = typed("enable_block_reuse", enable_block_reuse, bool)
        self.max_tokens = typed("max_tokens", max_tokens, int)
        self.enable_partial_reuse = typed("enable_partial_reuse", enable_partial_reuse, bool)


class OrchestratorConfig:
    def __init__(self, is_orchestrator=True, worker_executable_path="", orch_leader_comm=None, spawn_processes=True):
        self.is_orchestrator = typed("is_orchestrator", is_orchestrator, bool)
        self.worker_executable_path = typed("worker_executable_path", worker_executable_path, str)
        self.spawn_processes = typed("spawn_processes", spawn_processes, bool)
        if orch_leader_comm is not None:
            raise NotImplementedError("this stand-in has no MPI")


class ParallelConfig:
    def __init__(
        self,
        communication_type=CommunicationType.MPI,
        communication_mode=CommunicationMode.LEADER,
        device_ids=None,
        participant_ids=None,
        orchestrator_config=None,
        num_nodes=None,
    ):
        self.communication_type = typed("communication_type", communication_type, CommunicationType)
        self.communication_mode = typed("communication_mode", communication_mode, CommunicationMode)
        self.device_ids = ids("device_ids", device_ids)
        self.participant_ids = ids("participant_ids", participant_ids)
        self.orchestrator_config = typed("orchestrator_config", orchestrator_config, OrchestratorConfig)
        self.num_nodes = typed("num_nodes", num_nodes, int)

    def check(self, num_ranks):
        """One process has one rank: more must be spawned, one a GPU, by a program that is there."""
        check(self.communication_mode is CommunicationMode.ORCHESTRATOR, "ranks without MPI processes")
        check(self.device_ids is None or len(self.device_ids) == num_ranks, f"{self.device_ids} for {num_ranks} ranks")
        check(self.orchestrator_config is not None and self.orchestrator_config.is_orchestrator, "no orchestrator")
        check(Path(self.orchestrator_config.worker_executable_path).is_file(), "no worker executable")


class ExecutorConfig:
    """Defaults of the bindings (nanobind/executor/executorConfig.cpp): no chunked context."""

    def __init__(
        self,
        max_beam_width=1,
        *,
        kv_cache_config=None,
        enable_chunked_context=False,
        iter_stats_max_iterations=1000,
        gather_generation_logits=False,
        decoding_config=None,
        parallel_config=None,
    ):
        self.parallel_config = typed("parallel_config", parallel_config, ParallelConfig)
        self.max_beam_width = typed("max_beam_width", max_beam_width, int)
        self.kv_cache_config = typed("kv_cache_config", kv_cache_config, KvCacheConfig) or KvCacheConfig()
        self.enable_chunked_context = typed("enable_chunked_context", enable_chunked_context, bool)
        self.iter_stats_max_iterations = typed("iter_stats_max_iterations", iter_stats_max_iterations, int)
        self.gather_generation_logits = typed("gather_generation_logits", gather_generation_logits, bool)
        self.decoding_config = typed("decoding_config", decoding_config, DecodingConfig) or DecodingConfig()


#: Arguments of Request that this stand-in takes and cannot honour.
UNSUPPORTED = frozenset({
    "position_ids", "stop_words", "prompt_tuning_config", "multimodal_input", "multimodal_embedding", "mrope_config",
    "lora_config", "kv_cache_retention_config", "logits_post_processor_name", "logits_post_processor",
    "encoder_input_token_ids", "context_phase_params", "encoder_input_features", "encoder_output_length",
    "cross_attention_mask", "skip_cross_attn_blocks", "guided_decoding_params", "language_adapter_uid",
    "allotted_time_ms", "client_id", "priority", "type",
})  # fmt: skip


class Request:
    """Checks of executor/requestImpl.h.

    cache_salt_id: a property, not in the first nanobind bindings of 1.0 (nanobind/executor/request.cpp).
    """

    cache_salt_id = None

    def __init__(
        self,
        input_token_ids,
        max_tokens,
        *,
        streaming=False,
        sampling_config=None,
        output_config=None,
        end_id=None,
        pad_id=None,
        bad_words=None,
        embedding_bias=None,
        external_draft_tokens_config=None,
        lookahead_config=None,
        eagle_config=None,
        return_all_generated_tokens=False,
        num_return_sequences=None,
        cache_salt_id=None,
        **others,
    ):
        if unknown := set(others) - UNSUPPORTED:
            raise TypeError(f"incompatible constructor arguments: {sorted(unknown)}")
        if others:
            raise NotImplementedError(f"this stand-in does nothing with {sorted(others)}")
        if input_token_ids is None or max_tokens is None:
            raise TypeError("incompatible constructor arguments: input_token_ids and max_tokens are needed")
        self.input_token_ids = ids("input_token_ids", input_token_ids)
        self.max_tokens = typed("max_tokens", max_tokens, int)
        self.streaming = typed("streaming", streaming, bool)
        self.sampling_config = typed("sampling_config", sampling_config, SamplingConfig) or SamplingConfig()
        self.output_config = typed("output_config", output_config, OutputConfig) or OutputConfig()
        self.end_id = typed("end_id", end_id, int)
        self.pad_id = typed("pad_id", pad_id, int)
        self.bad_words = id_lists("bad_words", bad_words)
        self.embedding_bias = typed("embedding_bias", embedding_bias, torch.Tensor)
        self.external_draft_tokens_config = typed(
            "external_draft_tokens_config", external_draft_tokens_config, ExternalDraftTokensConfig
        )
        self.lookahead_config = typed("lookahead_config", lookahead_config, LookaheadDecodingConfig)
        self.eagle_config = typed("eagle_config", eagle_config, EagleConfig)
        self.return_all_generated_tokens = typed("return_all_generated_tokens", return_all_generated_tokens, bool)
        self.num_return_sequences = typed("num_return_sequences", num_return_sequences, int)
        self.cache_salt_id = typed("cache_salt_id", cache_salt_id, int)
        check(input_token_ids, "the prompt is empty")
        check(max_tokens > 0, "mMaxNewTokens > 0")

    @property
    def drafts(self):
        """The draft tokens that the caller sent."""
        return self.external_draft_tokens_config.tokens if self.external_draft_tokens_config else []
