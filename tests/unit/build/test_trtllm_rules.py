"""TensorRT-LLM specs and plans: what is read, what is refused, and in which words."""

import json
from pathlib import Path

import pytest

from build.trtllm.__main__ import main
from build.trtllm.gpus import KNOWN, Gpu, find_gpu
from build.trtllm.plan import make_plan
from build.trtllm.rules import check_engine_fits, check_spec
from build.trtllm.shapes import read_shape
from build.trtllm.spec import EngineSpec, load_spec
from build.trtllm.versions import find_release
from orchestrator.core.errors import ConfigError
from tests.unit.build.test_trtllm_plan import (
    CHECKPOINTS,
    DATA,
    DRAFT,
    EAGLE,
    LLAMA_8B,
    MEDUSA,
    MIXTRAL,
    REDRAFTER,
    planned,
)

QWEN = str(CHECKPOINTS / "qwen2.5-coder-32b")
VICUNA_7B = str(CHECKPOINTS / "vicuna-7b-v1.3")
LOOKAHEAD = {**LLAMA_8B, "method": "lookahead"}
PROMPT_LOOKUP = {**LLAMA_8B, "method": "prompt_lookup"}


def refusal(make, *arguments, **named):
    with pytest.raises(ConfigError) as caught:
        make(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def write(tmp_path):
    def _write(text):
        (tmp_path / "engines.toml").write_text(text)
        return tmp_path / "engines.toml"

    return _write


def test_spec_takes_flags_before_file_before_defaults(write):
    spec = load_spec(write('method = "lookahead"\nmax_batch_size = 3\nkv_fraction = 0.5'), {"max_batch_size": "5"})
    assert (spec.method, spec.max_batch_size, spec.kv_fraction) == ("lookahead", 5, 0.5)
    assert spec.tokens_per_block == EngineSpec().tokens_per_block


def test_spec_paths_start_at_their_file_and_hub_ids_stay(write, tmp_path):
    spec = load_spec(write('target = "../t"\ndrafter = "meta-llama/Llama-3.2-1B"'), {})
    assert (spec.target, spec.drafter) == (str(tmp_path.parent / "t"), "meta-llama/Llama-3.2-1B")
    assert load_spec(None, {"target": "./t"}).target == str(Path.cwd() / "t")


def test_spec_unknown_user_is_refused_where_the_value_is_set(write):
    file = write('target = "~nobody-at-all/t"')
    assert refusal(load_spec, file, {}).endswith(f"(key target in {file})")
    assert refusal(load_spec, None, {"target": "~nobody-at-all/t"}).endswith("(flag --target)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_batch = 3", "unknown key 'max_batch'; did you mean 'max_batch_size'?"),
        (
            "max_batch_size = true",
            "max_batch_size must be an integer in 1..65536, got True (key max_batch_size in ",
        ),
        ('max_batch_size = "8"', "max_batch_size must be an integer in 1..65536, got '8'"),
        ("max_batch_size = 0", "max_batch_size must be an integer in 1..65536, got 0"),
        ("kv_fraction = 1.5", "kv_fraction must be a number in 0.05..0.98, got 1.5"),
        ("kv_fraction = nan", "kv_fraction must be a number in 0.05..0.98, got nan"),
        ("lookahead_window = 1", "lookahead_window must be an integer in 2..64, got 1"),
        ("max_input_len = 40", "unknown key 'max_input_len'; did you mean 'max_seq_len'?"),
        ("gpu = 3", "gpu must be a string, got 3"),
        (
            'quantisation = "fp9"',
            "quantisation must be one of none, bf16, fp16, fp8, int4_awq, nvfp4, int8_sq, got 'fp9'; did you mean 'fp8'?",
        ),
        ('kv_cache_dtype = "fp4"', "kv_cache_dtype must be one of auto, fp8, got 'fp4'; did you mean 'fp8'?"),
        ('kv_cache_dtype = "int8"', "kv_cache_dtype must be one of auto, fp8, got 'int8'"),
        ('method = "medussa"', "unknown method 'medussa'; did you mean 'medusa'?"),
        ('method = "eagle3"', "method 'eagle3' has no compiled engine: only TensorRT-LLM's PyTorch backend runs it"),
        ("a = [", "is not TOML: "),
    ],
)
def test_spec_file_is_refused(write, text, expected):
    assert expected in refusal(load_spec, write(text), {})


def test_spec_flag_is_refused_by_its_name():
    words = refusal(load_spec, None, {"max_batch_size": "many"})
    assert words == "max_batch_size must be an integer in 1..65536, got 'many' (flag --max-batch-size)"


def test_tree_may_stand_in_the_file_as_lists_and_says_how_long_drafts_are(write):
    listed = load_spec(write("choices = [[0], [1], [0, 0]]"), {})
    assert listed == load_spec(None, {"choices": "[[0], [1], [0, 0]]"})
    spec = EngineSpec(**{**EAGLE, "choices": listed.choices, "eagle_layers": 2})
    check_spec(spec)
    assert spec.max_draft_len == 3


def test_spec_file_that_is_not_there_is_named(tmp_path):
    assert refusal(load_spec, tmp_path / "x.toml", {}).startswith(f"cannot read the engine file {tmp_path}/x.toml: ")


REFUSED = [
    ({**LLAMA_8B, "gpu": ""}, "gpu is missing: name the GPU that the engines are for (known: a100-40, a100-80, "),
    ({**LLAMA_8B, "gpu": "h1000"}, "unknown gpu 'h1000'; did you mean 'h100'?"),
    ({"gpu": "h100"}, "target is missing: name the model to serve"),
    ({**LLAMA_8B, "trtllm_version": "1.3.0"}, "TensorRT-LLM 1.3.0 has no engines that Triton serves: 1.2.1 is the last"),
    ({**LLAMA_8B, "trtllm_version": "1.2.3"}, "unknown trtllm_version '1.2.3'; did you mean '1.2.1'?"),
    ({**LLAMA_8B, "target": "/nowhere"}, "/nowhere"),
    # the drafter
    ({**DRAFT, "drafter": ""}, "method 'draft_model' needs a draft model, a folder or a hub id (key drafter)"),
    ({**EAGLE, "drafter": ""}, "method 'eagle' needs the heads' checkpoint"),
    ({**DRAFT, "method": "suffix"}, "drafter must be empty for method suffix (with one: draft_model, medusa, "),
    ({**DRAFT, "drafter": VICUNA_7B, "max_seq_len": 2048}, "the target's vocabulary of 128256 tokens, got 32000"),
    ({**EAGLE, "drafter": DRAFT["drafter"]}, "hidden_size must be the target's 4096, got 2048"),
    ({**REDRAFTER, **LLAMA_8B}, "vocab_size must be the target's 128256, got 32000"),
    ({**MEDUSA, "medusa_heads": 5}, "medusa_heads must be in 1..4, got 5"),
    # what an engine mode allows
    ({**EAGLE, "target": QWEN}, "method must be another for Qwen2ForCausalLM: its engines exist for LlamaForCausalLM only"),
    ({**MEDUSA, "target": QWEN}, "method must be another for Qwen2ForCausalLM"),
    ({**EAGLE, "max_batch_size": 513}, "max_batch_size must be in 1..512 for method eagle, got 513"),
    ({**EAGLE, "draft_len": 257}, "draft_len must be at most 256 for method eagle, got 257"),
    ({**PROMPT_LOOKUP, "draft_len": 129}, "draft_len must be at most 128 for method prompt_lookup, got 129"),
    ({**LOOKAHEAD, "lookahead_window": 20, "lookahead_ngram": 9}, "draft_len must be at most 128 for method lookahead, got 191"),
    ({**LOOKAHEAD, "draft_len": 16}, "draft_len must be 0 (worked out: 15) for method lookahead, got 16"),
    ({**REDRAFTER, "draft_len": 5}, "draft_len must be 0 (worked out: 25) for method redrafter, got 5"),
    ({**LLAMA_8B, "draft_len": 3}, "draft_len must be 0 (worked out: 0) for method none, got 3"),
    ({**MEDUSA, "quantisation": "bf16"}, "quantisation must be one of none, fp16, fp8, int4_awq for method medusa, got bf16"),
    ({**EAGLE, "quantisation": "fp8"}, "quantisation must be one of none, bf16, fp16 for method eagle, got fp8"),
    ({**EAGLE, "kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto for the target, whose weights are none; fp8 needs fp8 or nvfp4"),
    ({**LLAMA_8B, "quantisation": "int4_awq", "kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto for the target, whose weights are int4_awq"),
    ({**DRAFT, "quantisation": "fp8", "drafter_quantisation": "none", "kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto for the draft, whose weights are none"),
    # the tree
    ({**MEDUSA, "draft_len": 16}, "choices is missing: TensorRT-LLM's own tree has 63 nodes, and draft_len is 16"),
    ({**EAGLE, "draft_len": 128}, "choices is missing: TensorRT-LLM's own tree has 63 nodes, and draft_len is 128"),
    ({**EAGLE, "choices": "[[0], [1]]", "draft_len": 3}, "choices must have draft_len 3 nodes, got 2 (key choices)"),
    ({**EAGLE, "choices": "[[0], [1, 0]]"}, "choices names the node [1, 0], but not its parent: every node must be listed"),
    ({**EAGLE, "choices": "[[0], [0]]"}, "choices must name different nodes (key choices)"),
    ({**EAGLE, "choices": "[[0], []]"}, "choices must be a list of paths of child numbers, like [[0], [0, 0], [1]], got"),
    ({**EAGLE, "choices": "[[-1]]"}, "choices must be a list of paths"),
    ({**EAGLE, "choices": "["}, "choices is not JSON: "),
    ({**EAGLE, "choices": "[[0], [0, 0]]", "eagle_layers": 1}, "choices has 2 levels, the engine was built for at most 1 (key choices)"),
    ({**EAGLE, "choices": "[[0], [1], [0, 0], [1, 0]]", "eagle_layers": 2, "eagle_non_leaves": 1}, "choices has 2 nodes of one level with children, the engine was built for at most 1"),
    ({**MEDUSA, "choices": "[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]]"}, "choices has 5 levels, the engine was built for at most 4"),
    ({**EAGLE, "choices": "[[0], [0, 0], [1]]"}, "choices has 2 levels, the engine needs exactly 4 (eagle_layers) (key choices)"),
    ({**EAGLE, "eagle_layers": 5}, "choices is missing: TensorRT-LLM's own tree has 4 levels with up to 10 nodes that have children"),
    ({**EAGLE, "eagle_layers": 3}, "choices is missing: TensorRT-LLM's own tree has 4 levels"),
    ({**EAGLE, "eagle_non_leaves": 9}, "and needs eagle_layers 4 and eagle_non_leaves 10 at least"),
    ({**MEDUSA, "medusa_heads": 3}, "and needs medusa_heads 4 at least"),
    ({**EAGLE, "method": "eagle2", "choices": "[[0]]"}, "choices must be empty for method eagle2"),
    ({**EAGLE, "method": "eagle2", "eagle_non_leaves": 9}, "eagle_top_k must be in 1..9, the least of eagle_non_leaves and draft_len, got 10"),
    ({**EAGLE, "method": "eagle2", "draft_len": 8}, "eagle_top_k must be in 1..8, the least of eagle_non_leaves and draft_len, got 10"),
    ({**LOOKAHEAD, "choices": "[[0]]"}, "choices must be empty for method lookahead: medusa and eagle have one"),
    # sizes
    ({**LLAMA_8B, "tokens_per_block": 48}, "tokens_per_block must be one of 8, 16, 32, 64, 128, got 48"),
    ({**LOOKAHEAD, "max_batch_size": 9}, "max_batch_size must be in 1..8 for method lookahead, got 9"),
    ({**MEDUSA, "eagle_posterior": 0.1}, "eagle_posterior must be 0 for method medusa, got 0.1"),
    ({**LLAMA_8B, "max_seq_len": 131073}, "max_seq_len must be in 2..131072, the target's longest context, got 131073"),
    ({**EAGLE, "max_num_tokens": 511}, "max_num_tokens must be 0 (worked out) or at least 512 = max_batch_size 8 x (max_draft_len 63 + 1), got 511"),
    # sharing
    ({**LLAMA_8B, "num_gpus": 3}, "tensor_parallel must be a number that divides 32 heads, 8 KV heads"),
    ({**LLAMA_8B, "num_gpus": 3, "pipeline_parallel": 3}, "pipeline_parallel must be a number that divides 32 layers, got 3"),
    ({**LLAMA_8B, "num_gpus": 4, "tensor_parallel": 3}, "tensor_parallel x pipeline_parallel must be num_gpus 4, got 3 x 1"),
    ({**DRAFT, "drafter_tensor_parallel": 2}, "drafter_tensor_parallel must be in 1..1 (num_gpus), got 2"),
    ({**REDRAFTER, "num_gpus": 2, "pipeline_parallel": 2}, "pipeline_parallel must be 1 for method redrafter, got 2"),
    ({**EAGLE, "num_gpus": 2, "pipeline_parallel": 2}, "pipeline_parallel must be 1 for method eagle, got 2"),
    # number formats
    ({**LLAMA_8B, "gpu": "b200", "quantisation": "int4_awq"}, "int4_awq needs compute capability below 10.0 or above 11.9, b200 has 10.0"),
    ({**LLAMA_8B, "gpu": "b200", "quantisation": "int8_sq"}, "int8_sq needs compute capability below 10.0"),
    ({**LLAMA_8B, "gpu": "a100-80", "quantisation": "fp8"}, "fp8 needs compute capability 8.9, a100-80 has 8.0"),
    ({**LLAMA_8B, "quantisation": "nvfp4"}, "nvfp4 needs compute capability 10.0, h100 has 9.0"),
    ({**DRAFT, "gpu": "l40s", "drafter_quantisation": "nvfp4"}, "nvfp4 needs compute capability 10.0, l40s has 8.9"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), REFUSED, ids=[expected[:50] for _, expected in REFUSED])
def test_plan_is_refused(values, expected):
    assert expected in refusal(planned, values)


def test_plan_that_does_not_fit_is_refused_with_its_sum():
    words = refusal(planned, {**DRAFT, "gpu": "l4", "max_batch_size": 16, "max_seq_len": 8192, "draft_len": 3})
    assert words.startswith(
        "does not fit: GPU 0 has 22.00 GiB; target weights 14.96 + activations 0.84 + reserve 1.50 + draft weights "
        "2.79 + activations 0.44 + reserve 1.50 leave -0.03 GiB; the KV caches get 0.9 of it, room for 0 of 8224 tokens "
        "of the target, 131072 bytes each and 0 of 8192 tokens of the draft, 32768 bytes each, "
    )
    assert "max_seq_len" in words.partition("(take")[2]


def test_plan_that_lacks_one_block_of_one_sequence_is_refused():
    held = planned(LLAMA_8B, gpu="l4").memory.tokens.target
    assert planned(LLAMA_8B, gpu="l4", max_seq_len=held).memory.largest_batch >= 1
    assert "does not fit" in refusal(planned, LLAMA_8B, gpu="l4", max_seq_len=held + 1)


def test_gpu_memory_can_be_given():
    assert find_gpu("h200", 120).memory_gib == 120
    assert "does not fit: GPU 0 has 20.00 GiB" in refusal(planned, {**MEDUSA, "gpu_memory_gib": 20})


@pytest.mark.parametrize("spelt", ["H100", "a100-80GB", "RTX 4090", "rtx_6000_ada"])
def test_gpu_is_found_in_other_spellings(spelt):
    assert find_gpu(spelt).name in KNOWN


def test_gpu_below_compute_capability_8_is_refused():
    engine = planned(LLAMA_8B).engines[0]
    assert "compute capability 7.5; engines need 8.0" in refusal(check_engine_fits, engine, Gpu("t4", 15, (7, 5)))


@pytest.mark.parametrize(
    ("capability", "has_int4"), [((9, 0), True), ((10, 0), False), ((10, 3), False), ((11, 0), False), ((12, 0), True)]
)
def test_int4_weights_lack_from_compute_capability_10_0_to_11_9(capability, has_int4):
    assert Gpu("any", 100, capability).has_format("int4_awq") == has_int4


def test_release_before_the_examples_moved_names_the_old_folder():
    argv = planned(LLAMA_8B, trtllm_version="0.18.2").stages[0].argv
    assert argv[1] == "/app/examples/llama/convert_checkpoint.py"
    assert find_release("0.18.2").image == "nvcr.io/nvidia/tritonserver:25.04-trtllm-python-py3"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": None}, "hidden_size is missing ("),
        ({"vocab_size": "big"}, "vocab_size must be an integer of at least 1, got 'big' ("),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0 ("),
        ({"architectures": []}, "architectures must be a list of names, got [] ("),
    ],
)
def test_checkpoint_that_lacks_a_size_is_refused(tmp_path, change, expected):
    config = json.loads((CHECKPOINTS / "llama-3.1-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert expected in refusal(make_plan, EngineSpec(target=str(tmp_path), gpu="h100"))


def test_checkpoint_without_config_or_network_is_refused(tmp_path, monkeypatch):
    assert refusal(read_shape, str(tmp_path)).startswith(f"{tmp_path}: config.json cannot be found (for a plan, ")
    monkeypatch.setattr("build.trtllm.shapes.read_json", lambda source, name: None)  # as without a network
    assert refusal(read_shape, "meta-llama/Llama-3.1-8B").startswith(
        "meta-llama/Llama-3.1-8B: config.json cannot be found "
    )


def test_experts_all_lie_in_memory():
    weights = planned(MIXTRAL).memory.gpus[0].target.weights
    assert weights * 2 / 2e9 == pytest.approx(46.7, abs=0.3)  # billions, of both GPUs


def test_notes_tell_what_numbers_do_not():
    assert any("orchestrator mode" in note for note in planned(DRAFT, num_gpus=2).notes)
    assert any("#3499" in note for note in planned(DRAFT, num_gpus=2, drafter_tensor_parallel=2).notes)
    assert any("not max_batch_size 64" in note for note in planned(LLAMA_8B, gpu="l4", max_batch_size=64).notes)


def test_command_prints_a_plan_or_one_line(capsys):
    spec = str(DATA / "specs" / "eagle-l40s.toml")
    assert main(["plan", spec, "--gpu", "h200"]) == 0
    assert capsys.readouterr().out.startswith("eagle on 1 GPU h200, TensorRT-LLM 1.2.1\n")
    assert main(["plan", spec, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["name"] == "l40s"
    assert main(["plan", spec, "--gpu", "a10g"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("trtllm: does not fit: ") and err.count("\n") == 1
