"""The LLM API's speculative_config against NVIDIA's published contract, and what is refused."""

import json
from pathlib import Path

import pytest

from build.trtllm.llm_api import LlmApiSpec, speculative_config
from orchestrator.core.declarations import validate
from orchestrator.core.methods import METHODS
from tests.unit.build.test_trtllm_rules import refusal

CONTRACT = json.loads((Path(__file__).resolve().parents[2] / "data/trtllm/contracts/llm_api_1.3.json").read_text())
#: Method → decoding type and drafter; the table of docs/tensorrt-llm.md.
TYPES = {
    "draft_model": ("Draft_Target", "/draft"),
    "eagle3": ("Eagle3", "/eagle3"),
    "mtp": ("MTP", ""),
    "pard": ("PARD", "/pard"),
    "dflash": ("DFlash", "/dflash"),
    "prompt_lookup": ("NGram", ""),
    "suffix": ("SA", ""),
}


def made(method, **more):
    values = {"method": method, "drafter": TYPES.get(method, ("", ""))[1], **more}
    return speculative_config(validate(LlmApiSpec, values, lambda key: f"key {key}"))


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("method", TYPES)
def test_names_are_those_of_the_contract(method, sampling):
    found = made(method, sampling=sampling, draft_len=3)
    kind, drafter = found.pop("decoding_type"), found.get("speculative_model", "")
    assert (kind, drafter) == TYPES[method] and found["max_draft_len"] == 3
    assert found.keys() <= (CONTRACT["common"] | CONTRACT["types"][kind]).keys()
    assert found.keys().isdisjoint(CONTRACT["renamed"])
    assert ("allow_advanced_sampling" in found) == sampling


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_made_or_refused_with_a_reason(method):
    if method in TYPES:
        assert made(method)["max_draft_len"] > 0
    elif method == "none":
        assert made(method) == {}
    else:
        assert refusal(made, method).startswith(f"method '{method}' is not for the LLM API: ")


REFUSED = [
    ({"method": "eagle4"}, "unknown method 'eagle4'; did you mean 'eagle3'?"),
    ({"method": "eagle3", "drafter": ""}, "drafter must name a checkpoint for method eagle3, got ''"),
    ({"method": "mtp", "drafter": "/x"}, "drafter must be empty for method mtp, got '/x'"),
    ({"method": "none", "drafter": "/x"}, "drafter must be empty for method none, got '/x'"),
    ({"method": "mtp", "draft_len": 129}, "draft_len must be an integer in 0..128, got 129"),
    ({"method": "prompt_lookup", "max_ngram": 0}, "max_ngram must be an integer of at least 1, got 0"),
]


@pytest.mark.parametrize(("values", "expected"), REFUSED, ids=[expected[:40] for _, expected in REFUSED])
def test_spec_is_refused(values, expected):
    assert expected in refusal(made, **values)
