"""The corrections of the TensorRT-LLM path, each with the change that undoes it and the test that must then fail.

Items are numbered as in the table of docs/tensorrt-llm-source.md.
"""

from __future__ import annotations

from typing import NamedTuple

_BUILD, _ENGINE, _RUNTIME = "tests/unit/build/", "tests/unit/runtime/trtllm/executor/", "tests/unit/runtime/trtllm/"
_REFUSED = f"{_BUILD}test_trtllm_rules.py::test_plan_is_refused"
_SOURCE = f"{_ENGINE}test_as_the_source.py::"


class Correction(NamedTuple):
    """sound, broken: the text of `file` as it is, and as it was. test: a node id of pytest; of its cases: pytest's -k."""

    name: str
    file: str
    sound: str
    broken: str
    test: str
    cases: str = ""


CORRECTIONS = [
    Correction(
        "1 guided decoding",
        "build/trtllm/repository.py",
        '**dict.fromkeys(("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend"), ""),',
        "",
        f"{_BUILD}test_trtllm_repository.py::test_backend_is_given_what_it_makes_no_instance_without",
    ),
    Correction(
        "2 ReDrafter's base",
        "build/trtllm/commands.py",
        '"--base_model_checkpoint_dir": base',
        '"--model_dir": base',
        f"{_BUILD}test_trtllm_commands.py::test_redrafter_is_added_to_a_base_that_is_converted_or_quantised_before",
    ),
    Correction(
        "3 fp8 cache",
        "build/trtllm/rules.py",
        'engine.kv_cache_dtype == "fp8" and engine.quantisation not in FP8_KV',
        "False",
        _REFUSED,
        "kv_cache_dtype",
    ),
    Correction(
        "3 fp8 cache of the draft model",
        "build/trtllm/rules.py",
        'engine.kv_cache_dtype == "fp8" and',
        'engine.role == "target" and engine.kv_cache_dtype == "fp8" and',
        _REFUSED,
        "kv_cache_dtype",
    ),
    Correction(
        "3 int8 cache",
        "build/trtllm/spec.py",
        'Literal["auto", "fp8"]',
        'Literal["auto", "fp8", "int8"]',
        f"{_BUILD}test_trtllm_rules.py::test_spec_file_is_refused",
        "int8",
    ),
    Correction(
        "4 block reuse",
        "runtime/trtllm/executor/library.py",
        "manifest.mode == EXTERNAL and not share",
        "False",
        f"{_SOURCE}test_external_drafts_without_block_reuse_are_refused_before_the_library_does",
    ),
    Correction(
        "4 block reuse of the backend",
        "runtime/trtllm/backend/build_backend.py",
        "not config.prefix_sharing and _shares_blocks(manifest)",
        "False",
        f"{_RUNTIME}test_backend.py::test_prefix_sharing_cannot_be_off_where_the_backend_s_own_parameter_is_on",
    ),
    Correction(
        "5 chunked context",
        "runtime/trtllm/executor/library.py",
        "enable_chunked_context=True",
        "enable_chunked_context=False",
        f"{_SOURCE}test_prompt_longer_than_a_pass_is_computed_in_parts",
    ),
    Correction(
        "5 chunked context of the backend",
        "build/trtllm/plan.py",
        '"enable_chunked_context": "true"',
        '"enable_chunked_context": "false"',
        f"{_BUILD}test_trtllm_commands.py::test_prompts_of_any_length_are_computed_in_parts",
    ),
    Correction(
        "6 chunked prefill",
        "build/trtllm/llm_api.py",
        '"enable_chunked_prefill": True,',
        "",
        f"{_RUNTIME}test_llm_api.py::test_command_writes_a_folder_from_the_file_of_compiled_engines",
    ),
    Correction(
        "6 name of the drafter",
        "build/trtllm/llm_api.py",
        '"speculative_model_dir": spec.drafter',
        '"speculative_model": spec.drafter',
        f"{_BUILD}test_trtllm_llm_api.py::test_eagle3_has_another_name_before_1_2",
    ),
    Correction(
        "7 depth of a request's tree",
        "orchestrator/core/deployment/engine_trees.py",
        "is_exact=layers > 0",
        "is_exact=False",
        f"{_SOURCE}test_shallow_tree_of_one_client_ends_no_other_s_text",
    ),
    Correction(
        "7 the library's own tree, at load",
        "orchestrator/core/deployment/engine_trees.py",
        "        _check_default_tree(tree_limits(method, max_draft_len, spec), method)\n",
        "",
        f"{_SOURCE}test_engine_s_own_tree_must_fit_it",
    ),
    Correction(
        "7 the library's own tree, in the plan",
        "build/trtllm/rules.py",
        "check_tree(spec.method, read_tree(spec.choices), length, spec.model_dump())",
        "",
        _REFUSED,
        "eagle_non_leaves",
    ),
    Correction(
        "8 batch of Lookahead, in the plan",
        "build/trtllm/modes.py",
        "Mode(most_sequences=LOOKAHEAD_REQUESTS)",
        "Mode()",
        _REFUSED,
        "max_batch_size",
    ),
    Correction(
        "8 batch of Lookahead, at load",
        "runtime/trtllm/executor/library.py",
        'manifest.engine_method == "lookahead" and manifest.max_batch_size > LOOKAHEAD_REQUESTS',
        "False",
        f"{_SOURCE}test_lookahead_engine_for_more_than_eight_is_refused",
    ),
    Correction(
        "8 sampling with Lookahead",
        "orchestrator/core/deployment/capabilities.py",
        '("temperature", *_EDITS, LOGPROBS), "it is not established for engines',
        '(*_EDITS, LOGPROBS), "it is not established for engines',
        f"{_ENGINE}test_engine_side.py::test_temperature_and_log_probabilities_are_refused",
    ),
    Correction(
        "8 drafts that were not made",
        "runtime/trtllm/backend/adapters.py",
        " if _count(answer, DRAFTED) else 0",
        "",
        f"{_RUNTIME}test_backend.py::test_burst_tells_the_passes_as_far_as_they_were_counted",
    ),
    Correction(
        "9 pipeline of EAGLE",
        "build/trtllm/rules.py",
        '("redrafter", *EAGLE)',
        '("redrafter",)',
        _REFUSED,
        "pipeline_parallel",
    ),
    Correction(
        "10 formats of Blackwell",
        "build/trtllm/gpus.py",
        'NOT_ON_BLACKWELL, BLACKWELL = ("int4_awq", "int8_sq"), ',
        "NOT_ON_BLACKWELL, BLACKWELL = (), ",
        _REFUSED,
        "int8_sq or int4_awq",
    ),
    Correction(
        "11 block sizes",
        "build/trtllm/rules.py",
        "spec.tokens_per_block not in BLOCK_SIZES",
        "False",
        _REFUSED,
        "tokens_per_block",
    ),
    Correction(
        "12 salts of old bindings",
        "runtime/trtllm/executor/adapters.py",
        'not hasattr(api.Request, "cache_salt_id")',
        "False",
        f"{_SOURCE}test_salt_is_refused_where_the_bindings_have_none",
    ),
    Correction(
        "13 drafted paths",
        "runtime/trtllm/backend/adapters.py",
        "(num_passes - 1) * num_nodes",
        "_count(answer, DRAFTED)",
        f"{_RUNTIME}test_backend.py::test_burst_tells_the_passes_as_far_as_they_were_counted",
    ),
    Correction(
        "14 a request that would fail a pass",
        "runtime/trtllm/executor/engine_side.py",
        "if refusal := limits.refusal(speculation.choices)",
        'if refusal := ""',
        f"{_SOURCE}test_shallow_tree_of_one_client_ends_no_other_s_text",
    ),
    Correction(
        "14 error responses",
        "runtime/trtllm/executor/transport.py",
        "if response.has_error()",
        "if False",
        f"{_ENGINE}test_client.py::test_request_that_the_executor_refuses_is_an_error_of_its_own",
    ),
    Correction(
        "14 too long a text",
        "runtime/trtllm/executor/adapters.py",
        "if len(ids) > longest",
        "if False",
        f"{_ENGINE}test_refusals.py::test_context_beyond_the_engine_is_refused_with_its_length",
    ),
    Correction(
        "14 shortened output",
        "runtime/trtllm/executor/adapters.py",
        "room = (limits.max_seq_len + limits.max_draft_len - num_ids - 1) // 2",
        "room = limits.max_draft_len",
        f"{_SOURCE}test_output_is_never_shortened_without_a_word",
    ),
    Correction(
        "15 EAGLE-2",
        "runtime/trtllm/executor/library.py",
        'if manifest.engine_method == "eagle2"',
        "if False",
        f"{_SOURCE}test_dynamic_tree_is_a_setting_of_the_executor",
    ),
    Correction(
        "15 width of EAGLE-2's tree",
        "build/trtllm/rules.py",
        'spec.method == "eagle2" and spec.eagle_top_k > most',
        "False",
        _REFUSED,
        "eagle_top_k",
    ),
    Correction(
        "15 draft probabilities",
        "runtime/trtllm/executor/adapters.py",
        "ExternalDraftTokensConfig(drafts, logits=logits)",
        "ExternalDraftTokensConfig(drafts)",
        f"{_SOURCE}test_rejection_has_the_target_s_law_with_drafts_sampled_from_q",
    ),
    Correction(
        "15 q of a draft engine",
        "runtime/trtllm/executor/adapters.py",
        "if sampling.greedy or not sampling.rule.uses_q",
        "if True",
        f"{_SOURCE}test_draft_engine_samples_from_the_q_that_it_answers",
    ),
    Correction(
        "15 seed of sampled drafts",
        "runtime/trtllm/executor/adapters.py",
        "seed=child_seed(sampling.seed, DRAFTS)",
        "seed=sampling.seed",
        f"{_SOURCE}test_draft_engine_draws_with_another_seed_than_the_target",
    ),
    Correction(
        "16 rope_parameters",
        "build/trtllm/builder.py",
        'key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"',
        'key = "rope_scaling"',
        f"{_BUILD}test_trtllm_builder.py::test_conversion_that_loses_rope_scaling_is_refused",
    ),
    Correction(
        "16 rope_scaling",
        "build/trtllm/builder.py",
        "    _check_rope(stage, plan, out)\n",
        "",
        f"{_BUILD}test_trtllm_builder.py::test_conversion_that_loses_rope_scaling_is_refused",
    ),
    Correction(
        "17 decoding mode",
        "runtime/trtllm/executor/library.py",
        "api.DecodingConfig(modes.Medusa(), medusa_choices=paths)",
        "api.DecodingConfig(None, medusa_choices=paths)",
        f"{_SOURCE}test_decoding_configuration_names_its_mode",
    ),
    Correction(
        "18 typical acceptance",
        "runtime/trtllm/executor/library.py",
        '"greedy_sampling": False, ',
        "",
        f"{_SOURCE}test_sampling_with_eagle_is_typical_acceptance_of_the_whole_engine",
    ),
    Correction(
        "18 a request's epsilon",
        "runtime/trtllm/executor/engine_side.py",
        "if speculation.choices or epsilon not in (None, self._capabilities.epsilon)",
        "if speculation.choices",
        f"{_SOURCE}test_epsilon_of_a_request_is_sent_beside_the_engine_s_whole_tree",
    ),
    Correction(
        "18 load of an engine that samples",
        "orchestrator/server/request_builder.py",
        ", served.served_temperature",
        "",
        f"{_ENGINE}test_generation_requests.py::test_epsilon_is_the_engine_s_unless_a_request_names_one",
    ),
]
