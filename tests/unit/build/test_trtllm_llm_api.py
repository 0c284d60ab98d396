"""The LLM API's speculative_config: names per release against the table, and what is refused."""

import json
from pathlib import Path

import pytest

from build.trtllm.llm_api import LlmApiSpec, speculation
from orchestrator.core.declarations import validate
from orchestrator.core.methods import PROPOSED
from tests.unit.build.test_trtllm_rules import refusal

TABLE = json.loads((Path(__file__).resolve().parents[2] / "data/trtllm/llm_api.json").read_text())
VERSIONS = list(TABLE["decoding_types"])
DRAFTERS = {"draft_model": "/draft", "eagle3": "/eagle3", "mtp": "", "prompt_lookup": ""}


def made(method, **more):
    values = {"method": method, "drafter": DRAFTERS.get(method, ""), **more}
    return speculation(validate(LlmApiSpec, values, lambda key: f"key {key}"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("method", DRAFTERS)
def test_names_are_those_of_the_release(method, version):
    found = made(method, trtllm_version=version)
    assert found.decoding_type in TABLE["decoding_types"][version]
    assert found.decoding_type not in TABLE["compiled_engines_only"]
    assert found.speculative_config == {"decoding_type": found.decoding_type, **found.fields}
    common = set(TABLE["common_fields"])
    if version < "1.2":
        common = {TABLE["older_fields"].get(field, field) for field in common}
    assert found.fields.keys() <= common | TABLE["classes"][found.class_name].keys()
    overlap = {"disable_overlap_scheduler": True} if found.decoding_type in TABLE["disable_overlap_scheduler"] else {}
    assert found.llm == overlap


def test_draft_model_of_1_2():
    found = made("draft_model", draft_len=4)
    assert found.speculative_config == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "speculative_model_dir": "/draft",
    }
    assert found.llm == {"disable_overlap_scheduler": True}


def test_eagle3_has_another_name_before_1_2():
    new, old = made("eagle3"), made("eagle3", trtllm_version="1.1.0")
    example = TABLE["example_of_1_2"]
    assert new.decoding_type in example["decoding_type"]
    assert list(new.fields) == list(old.fields) == ["max_draft_len", "speculative_model_dir"]  # a name of all releases
    assert old.speculative_config == {"decoding_type": "Eagle", "max_draft_len": 4, "speculative_model_dir": "/eagle3"}


def test_prompt_lookup_keeps_requests_apart():
    assert made("prompt_lookup", max_ngram=2).speculative_config == {
        "decoding_type": "NGram",
        "max_draft_len": 20,  # the default of the server's own prompt_lookup
        "max_matching_ngram_size": 2,
        "is_public_pool": False,
    }
    assert TABLE["classes"]["NGramDecodingConfig"]["is_public_pool"] is True


def test_mtp_counts_its_layers():
    assert made("mtp").fields == {"num_nextn_predict_layers": 1} == made("mtp", trtllm_version="1.0.0").fields
    assert made("mtp", draft_len=3).fields == {"num_nextn_predict_layers": 3}


@pytest.mark.parametrize("method", PROPOSED)
def test_every_method_is_made_or_refused_with_a_reason(method):
    if method in DRAFTERS:
        assert made(method).fields
    else:
        assert refusal(made, method).startswith(f"method '{method}' is not for the LLM API: ")


REFUSED = [
    ({"method": "medusa"}, "its type is for compiled engines only"),
    ({"method": "lookahead"}, "its type is for compiled engines only"),
    ({"method": "eagle2"}, "its dynamic tree came after 1.2.1"),
    ({"method": "redrafter"}, "the LLM API has no decoding type for it"),
    ({"method": "none"}, "LLM() without a speculative_config does it"),
    ({"method": "eagle4"}, "unknown method 'eagle4'; did you mean 'eagle3'?"),
    ({"method": "eagle3", "drafter": ""}, "drafter must name a checkpoint for method eagle3, got ''"),
    ({"method": "mtp", "drafter": "/x"}, "drafter must be empty for method mtp, got '/x'"),
    ({"method": "mtp", "draft_len": 2, "trtllm_version": "1.1.0"}, "draft_len must be 1 for method mtp before 1.2, got 2"),
    ({"method": "mtp", "draft_len": 129}, "draft_len must be an integer in 0..128, got 129"),
    ({"method": "mtp", "draft_len": -1}, "draft_len must be an integer in 0..128, got -1"),
    ({"method": "prompt_lookup", "max_ngram": 0}, "max_ngram must be an integer of at least 1, got 0"),
    ({"method": "mtp", "trtllm_version": "0.21.0"}, "the LLM API's names in TensorRT-LLM 0.21.0 are not known here"),
    ({"method": "mtp", "trtllm_version": "1.3.0"}, "the LLM API's names in TensorRT-LLM 1.3.0 are not known here"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), REFUSED, ids=[expected[:40] for _, expected in REFUSED])
def test_spec_is_refused(values, expected):
    assert expected in refusal(made, **values)
