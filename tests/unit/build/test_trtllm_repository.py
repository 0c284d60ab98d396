"""Model folders for NVIDIA's backend: parsed as Triton parses them, against its own configuration."""

import json
import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from build.trtllm.backend_tensors import inputs, outputs
from build.trtllm.repository import main, write_repository
from orchestrator.core.deployment.config import BACKEND_MODELS
from orchestrator.core.errors import ConfigError
from runtime.trtllm.executor.library import WORKER
from tests.unit.build.test_trtllm_plan import DATA, DRAFT, EAGLE, LLAMA_8B, MEDUSA, REDRAFTER, planned

MODEL = json.loads((DATA / "tensorrt_llm.json").read_text())
ENGINES = Path("/engines/it")
#: What the template leaves open, and we fill in.
FILLED = {
    "${logits_datatype}": "FP32",
    "${encoder_input_features_data_type}": "FP16",
    "${prompt_embedding_table_data_type}": "FP16",
}
#: Empty = no guided decoding.
GUIDED = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")
PLANS = {
    "none": LLAMA_8B,
    "draft_model": DRAFT,
    "suffix": {**LLAMA_8B, "method": "suffix"},
    "lookahead": {**LLAMA_8B, "method": "lookahead"},
    "medusa": MEDUSA,
    "eagle": EAGLE,
    "redrafter": REDRAFTER,
    "two GPUs": {**LLAMA_8B, "num_gpus": 2},
    "0.19": {**DRAFT, "trtllm_version": "0.19.0"},
}


def configs(tmp_path, values, **options):
    """Return {Triton model: its configuration as a protobuf message}."""
    files = write_repository(planned(values), ENGINES, tmp_path, **options)
    return {file.parent.name: text_format.Parse(file.read_text(), model_config_pb2.ModelConfig()) for file in files}


def parameters(config):
    return {key: value.string_value for key, value in config.parameters.items()}


def type_and_dims(tensor):
    return model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_"), list(tensor.dims)


def declared(tensor):
    """Return (type, dims, reshaped, ragged, optional) of an input in a parsed configuration."""
    reshaped = tensor.HasField("reshape")
    assert not reshaped or not tensor.reshape.shape
    return *type_and_dims(tensor), reshaped, tensor.allow_ragged_batch, tensor.optional


def published(tensor):
    dtype = FILLED.get(tensor["dtype"], tensor["dtype"])
    return dtype, tensor["dims"], "reshape" in tensor, tensor.get("ragged", False), tensor["optional"]


@pytest.mark.parametrize("values", PLANS.values(), ids=PLANS)
def test_folder_of_every_kind_of_plan_is_complete(tmp_path, values):
    made = configs(tmp_path, values)
    plan = planned(values)
    assert list(made) == [BACKEND_MODELS[engine.role] for engine in plan.engines]
    for engine in plan.engines:
        name = BACKEND_MODELS[engine.role]
        config, text = made[name], (tmp_path / name / "config.pbtxt").read_text()
        assert not re.search(r"\$\{|\$[A-Za-z]|TODO", text)
        assert (config.name, config.backend) == (name, "tensorrtllm")
        assert config.max_batch_size == engine.limits.max_batch_size >= 1
        assert (tmp_path / name / "1").is_dir()
        assert parameters(config)["gpt_model_path"] == f"/engines/it/engines/{engine.role}"


def test_inputs_are_nvidias_own(tmp_path):
    config = configs(tmp_path, LLAMA_8B)["tensorrt_llm"]
    assert {t.name: declared(t) for t in config.input} == {t["name"]: published(t) for t in MODEL["inputs"]}
    assert len(config.input) == len(MODEL["inputs"])


def test_outputs_are_nvidias_own(tmp_path):
    config = configs(tmp_path, LLAMA_8B)["tensorrt_llm"]
    expected = {t["name"]: (FILLED.get(t["dtype"], t["dtype"]), t["dims"]) for t in MODEL["outputs"]}
    assert {t.name: type_and_dims(t) for t in config.output} == expected
    assert len(config.output) == len(MODEL["outputs"])


def test_tensors_of_0_19_have_its_names_and_not_the_later_ones(tmp_path):
    config = configs(tmp_path, PLANS["0.19"])["tensorrt_llm"]
    for given, found in ((MODEL["inputs"], config.input), (MODEL["outputs"], config.output)):
        assert {t.get("name_0_19", t["name"]) for t in given if t.get("since") != "1.x"} == {t.name for t in found}


def test_logits_are_of_the_type_that_the_engines_are_built_with():
    for stage in planned(DRAFT).stages:
        if "--logits_dtype" in stage.argv:
            assert stage.argv[stage.argv.index("--logits_dtype") + 1] == "float32"
    logits = [t for t in (*inputs("1.2.1"), *outputs("1.2.1")) if t.name.endswith("_logits") and t.data_type != "BOOL"]
    assert [t.data_type for t in logits] == ["FP32"] * 3


@pytest.mark.parametrize("values", PLANS.values(), ids=PLANS)
def test_parameters_are_known_and_their_words_allowed(tmp_path, values):
    known = {parameter["key"]: parameter for parameter in MODEL["parameters"]}
    for config in configs(tmp_path, values).values():
        for key, word in parameters(config).items():
            assert key in known and (word or key in GUIDED)
            assert word in known[key].get("choices", [word]) or key in GUIDED


def test_parameters_are_the_plans_beside_the_fixed_ones(tmp_path):
    plan, made = planned(DRAFT), configs(tmp_path, DRAFT)
    for role, name in BACKEND_MODELS.items():
        assert parameters(made[name]).items() >= plan.servers[role].items()
        assert parameters(made[name])["exclude_input_in_output"] == "false"
        assert parameters(made[name])["gpt_model_type"] == "inflight_fused_batching"
        assert parameters(made[name])["executor_worker_path"] == str(WORKER)
    assert str(WORKER) in {parameter.get("default") for parameter in MODEL["parameters"]}
    assert "decoding_mode" not in parameters(made["tensorrt_llm_draft"])


@pytest.mark.parametrize(("method", "mode"), [("medusa", "medusa"), ("eagle", "eagle"), ("redrafter", "redrafter")])
def test_engine_that_drafts_has_its_decoding_mode(tmp_path, method, mode):
    assert parameters(configs(tmp_path, PLANS[method])["tensorrt_llm"])["decoding_mode"] == mode


def test_lookahead_has_all_three_sizes(tmp_path):
    found = parameters(configs(tmp_path, PLANS["lookahead"])["tensorrt_llm"])
    sizes = [found[f"lookahead_{name}"] for name in ("window_size", "ngram_size", "verification_set_size")]
    assert (found["decoding_mode"], sizes) == ("lookahead", ["4", "3", "4"])


@pytest.mark.parametrize("method", PLANS)
def test_backend_is_given_what_it_makes_no_instance_without(tmp_path, method):
    """model_instance_state.cc reads these three outside of any try."""
    found = parameters(configs(tmp_path, PLANS[method])["tensorrt_llm"])
    assert [found[name] for name in GUIDED] == ["", "", ""]
    assert found["enable_chunked_context"] == "true"


@pytest.mark.parametrize("more", [{"method": "eagle2"}, {"eagle_posterior": 0.1}])
def test_dynamic_trees_and_sampling_of_eagle_are_refused(tmp_path, more):
    with pytest.raises(ConfigError, match="no parameter for EAGLE's dynamic tree or sampling"):
        configs(tmp_path, {**PLANS["eagle"], **more})


def test_model_is_not_decoupled_and_nothing_waits(tmp_path):
    config = configs(tmp_path, LLAMA_8B)["tensorrt_llm"]
    assert not config.model_transaction_policy.decoupled
    assert config.HasField("dynamic_batching") and not config.dynamic_batching.max_queue_delay_microseconds
    (group,) = config.instance_group
    assert (str(group.count), model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind)) == tuple(
        MODEL["instance_group"].values()
    )


# The tree of Medusa and EAGLE.

TREE = [[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_tree_is_written_in_braces(tmp_path, method):
    config = configs(tmp_path, {**PLANS[method], "choices": json.dumps(TREE)})["tensorrt_llm"]
    assert parameters(config)[f"{method}_choices"] == "{0},{1},{0,0},{0,0,0},{0,0,0,0}"


def test_engine_of_63_nodes_takes_the_backends_own_tree(tmp_path):
    assert "medusa_choices" not in parameters(configs(tmp_path, MEDUSA)["tensorrt_llm"])


@pytest.mark.parametrize("version", ["0.18.2", "0.20.0", "0.21.0"])
def test_release_whose_names_are_not_known_is_refused(tmp_path, version):
    with pytest.raises(ConfigError, match=f"the tensors of TensorRT-LLM {version}'s backend are not known here"):
        configs(tmp_path, {**LLAMA_8B, "trtllm_version": version})


def test_command_writes_the_folders_or_says_in_one_line_why_not(tmp_path, capsys):
    spec = str(DATA / "specs" / "draft-model-2xh100.toml")
    assert main([spec, "--engines", "/engines", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/{name}/config.pbtxt" for name in BACKEND_MODELS.values()
    ]
    assert main([str(tmp_path / "x.toml"), "--engines", "/engines", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
