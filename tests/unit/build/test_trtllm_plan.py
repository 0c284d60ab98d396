"""TensorRT-LLM plans: golden texts, JSON, memory against published numbers and by hand.

The golden plans are rewritten by `python -m tests.unit.build.test_trtllm_plan`; read the difference before keeping it.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from build.trtllm.engines import target_limits
from build.trtllm.modes import MODES
from build.trtllm.plan import make_plan
from build.trtllm.render import plan_json, plan_text
from build.trtllm.shapes import eagle_parameters, model_parameters, read_shape
from build.trtllm.spec import EngineSpec, load_spec
from orchestrator.core.deployment.engine_trees import lookahead_nodes
from orchestrator.core.errors import ConfigError
from orchestrator.core.methods import PROPOSED

DATA = Path(__file__).resolve().parents[2] / "data" / "trtllm"
CHECKPOINTS = DATA / "checkpoints"
SPECS = sorted(path.stem for path in (DATA / "specs").glob("*.toml"))
#: Specs that the other test files vary, too.
LLAMA_8B = {"target": str(CHECKPOINTS / "llama-3.1-8b"), "gpu": "h100"}
DRAFT = {**LLAMA_8B, "method": "draft_model", "drafter": str(CHECKPOINTS / "llama-3.2-1b")}
EAGLE = {**LLAMA_8B, "method": "eagle", "drafter": str(CHECKPOINTS / "eagle-llama-3.1-8b")}
VICUNA = {"gpu": "h100", "max_seq_len": 2000}
MEDUSA = {
    **VICUNA,
    "target": str(CHECKPOINTS / "vicuna-13b-v1.3"),
    "method": "medusa",
    "drafter": str(CHECKPOINTS / "medusa-vicuna-13b-v1.3"),
}
REDRAFTER = {
    **VICUNA,
    "target": str(CHECKPOINTS / "vicuna-7b-v1.3"),
    "method": "redrafter",
    "drafter": str(CHECKPOINTS / "redrafter-vicuna-7b"),
}
MIXTRAL = {"target": str(CHECKPOINTS / "mixtral-8x7b"), "gpu": "h100", "num_gpus": 2}


def plan_of(name, **flags):
    return make_plan(load_spec(DATA / "specs" / f"{name}.toml", flags))


def golden_text(name):
    return plan_text(plan_of(name)).replace(str(CHECKPOINTS), "/checkpoints")


def planned(values, **more):
    return make_plan(EngineSpec.model_construct(**{**values, **more}))


@pytest.mark.parametrize("name", SPECS)
def test_plan_of_a_known_deployment_is_the_golden_one(name):
    assert golden_text(name) == (DATA / "golden" / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", SPECS)
def test_json_has_the_whole_plan(name):
    plan = plan_of(name)
    assert json.loads(plan_json(plan)) == json.loads(TypeAdapter(type(plan)).dump_json(plan))


# Every kind of plan.

VARIANTS = {
    "plain": LLAMA_8B,
    "pipeline": {**LLAMA_8B, "num_gpus": 4, "pipeline_parallel": 2},
    "awq": {**LLAMA_8B, "quantisation": "int4_awq"},
    "nvfp4": {**LLAMA_8B, "quantisation": "nvfp4", "gpu": "b200", "kv_cache_dtype": "fp8"},
    "int8_sq": {**LLAMA_8B, "quantisation": "int8_sq", "method": "suffix"},
    "fp8 weights and cache": {**LLAMA_8B, "quantisation": "fp8", "kv_cache_dtype": "fp8", "method": "ngram"},
    "quantised redrafter": {**REDRAFTER, "quantisation": "fp8"},
    "eagle2": {**EAGLE, "method": "eagle2", "draft_len": 32, "eagle_posterior": 0.1},
    "medusa fp8": {**MEDUSA, "quantisation": "fp8"},
    "experts": {**MIXTRAL, "method": "predicted"},
    "two drafts": {**DRAFT, "num_gpus": 2, "drafter_tensor_parallel": 2, "draft_kv_share": 0.2},
    "bf16 eagle": {**EAGLE, "quantisation": "bf16", "num_gpus": 2},
    "older release": {**LLAMA_8B, "trtllm_version": "0.18.2"},
}


def all_plans():
    return [plan_of(name) for name in SPECS] + [planned(values) for values in VARIANTS.values()]


def test_every_method_of_the_server_is_planned_or_refused_with_a_reason():
    for method in PROPOSED:
        if method not in MODES:
            with pytest.raises(ConfigError, match="has no compiled engine: "):
                load_spec(None, {"method": method})


# Memory, against numbers from elsewhere and by hand.


def test_lookahead_length_is_the_published_one():
    assert (lookahead_nodes(7, 7, 7), lookahead_nodes(4, 3, 4)) == (83, 15)
    assert lookahead_nodes(1, 1, 0) == 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-70b", 70.55), ("llama-3.1-8b", 8.03), ("vicuna-13b-v1.3", 13.02), ("qwen2.5-coder-32b", 32.76)],
)
def test_parameters_are_as_many_as_the_models_have(name, billions):
    assert model_parameters(read_shape(str(CHECKPOINTS / name))) / 1e9 == pytest.approx(billions, abs=0.01)


def test_eagle_drafter_has_the_papers_size():
    """0.24 to 0.99 billion for targets of 7 to 70 billion (arXiv:2401.15077)."""
    small, large = (read_shape(str(CHECKPOINTS / name)) for name in ("vicuna-7b-v1.3", "llama-3.1-70b"))
    assert eagle_parameters(replace(small, layers=1)) / 1e9 == pytest.approx(0.24, abs=0.005)
    assert eagle_parameters(replace(large, layers=1)) / 1e9 == pytest.approx(0.99, abs=0.005)


def test_kv_of_a_token_agrees_with_the_share_of_a_feature_row():
    """DESIGN: a row of hidden states costs an 8B model 6 % of its KV memory, three cost 19 %."""
    kv = planned(LLAMA_8B).memory.gpus[0].target.kv_per_token
    assert kv == 131072
    assert (round(100 * 4096 * 2 / kv), round(100 * 3 * 4096 * 2 / kv)) == (6, 19)


def test_weights_of_70b_in_fp8_on_two_gpus_by_hand():
    linear = 80 * (2 * 8192 * 128 * (64 + 8) + 3 * 8192 * 28672) // 2
    plain = 128256 * 8192 + 128256 // 2 * 8192 + 8192 * (2 * 80 + 1)
    for gpu in plan_of("draft-model-2xh100").memory.gpus:
        assert gpu.target.weights == linear + 2 * plain
        assert gpu.target.kv_per_token == 2 * 80 * 4 * 128


def test_logits_of_a_64_node_tree_are_33_mb():
    """DESIGN: a 64-node tree over a 128k vocabulary."""
    spec = {**EAGLE, "max_batch_size": 1, "max_num_tokens": 64, "draft_len": 63}
    more = planned({**spec, "max_batch_size": 2, "max_num_tokens": 128})
    less = planned({**spec, "max_num_tokens": 128})
    rows = more.memory.gpus[0].target.activations - less.memory.gpus[0].target.activations
    assert round(rows / 2 / 1e6) == 33  # once by the LM head, once in the sampler


@pytest.mark.parametrize(("quantisation", "bits"), [("fp8", 8), ("int8_sq", 8), ("int4_awq", 4.125), ("nvfp4", 4.5)])
def test_a_smaller_format_saves_its_bits_of_the_linear_layers(quantisation, bits):
    linear = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336)
    plain, small = (
        planned({**LLAMA_8B, "gpu": "b200" if q == "nvfp4" else "h200"}, quantisation=q).memory.gpus[0].target.weights
        for q in ("bf16", quantisation)
    )
    assert plain - small == linear * (16 - bits) / 8


def test_pipeline_shares_layers_and_puts_embedding_first_and_lm_head_last():
    first, last = (gpu.target.weights for gpu in planned(LLAMA_8B, num_gpus=2, pipeline_parallel=2).memory.gpus)
    assert last - first == 0  # embedding and LM head are of one size here
    assert 2 * first == planned(LLAMA_8B).memory.gpus[0].target.weights + 2 * 4096  # the last norm: counted by each


@pytest.mark.parametrize("plan", all_plans(), ids=[*SPECS, *VARIANTS])
def test_caches_fit_and_fill_the_fullest_gpu(plan):
    tokens, block = plan.memory.tokens, plan.spec.tokens_per_block
    left = []
    for gpu in plan.memory.gpus:
        draft_kv = gpu.draft.kv_per_token if gpu.draft else 0
        used = tokens.target * gpu.target.kv_per_token + tokens.draft * draft_kv
        left.append(plan.spec.kv_fraction * gpu.free - used)
    assert min(left) >= 0
    assert plan.spec.draft_kv_share or min(left) < block * 2**20
    assert tokens.target % block == 0


def test_fractions_are_of_what_is_free_when_the_engine_is_loaded():
    plan = plan_of("draft-model-1xh200")
    gpu = plan.memory.gpus[0]
    kv = plan.memory.tokens.target * gpu.target.kv_per_token
    shares = [float(parameters["kv_cache_free_gpu_mem_fraction"]) for parameters in plan.servers.values()]
    assert shares[0] * (gpu.total - gpu.target.fixed) == pytest.approx(kv, rel=0.002)
    assert shares[1] * (gpu.free - kv) == pytest.approx(plan.memory.tokens.draft * gpu.draft.kv_per_token, rel=0.003)


@pytest.mark.parametrize("name", SPECS)
def test_largest_batch_fits_in_full_and_one_more_does_not(name):
    spec, most = plan_of(name).spec, plan_of(name).memory.largest_batch
    for batch, fits in ((most, True), (most + 1, False))[: 1 if most == MODES[spec.method].most_sequences else 2]:
        plan = make_plan(spec.model_copy(update={"max_batch_size": batch}))
        blocks = -(-plan.engines[0].limits.engine_seq_len // spec.tokens_per_block)  # of one sequence
        assert (plan.memory.tokens.target // spec.tokens_per_block // batch >= blocks) == fits


def test_builder_adds_drafts_and_eagle_layers_to_the_length():
    assert target_limits(EngineSpec(**EAGLE), 1).engine_seq_len == 4096 + 63 + 4
    assert target_limits(EngineSpec(**REDRAFTER), 1).engine_seq_len == 2000 + 25


if __name__ == "__main__":
    for spec_name in SPECS:
        (DATA / "golden" / f"{spec_name}.txt").write_text(golden_text(spec_name))
