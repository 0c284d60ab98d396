"""Values of a head's config.json that cannot be: each is refused with the key, the value, what is allowed, the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import ConfigError
from runtime.models.heads.sharpness import Sharpness
from tests.support.heads import load, make_head, make_target

WHOLE_NUMBERS = "must be a list in which each value is an integer"
COUNT, NUMBER, MAPPING = r"must be an integer", r"must be a number", r"must be an object"
#: key, value, what is said of it; for both kinds of EAGLE heads.
EAGLE_VALUES = [
    ("target_fingerprint", 12, "must be a string"),
    ("target_fingerprint", ["a"], "must be a string"),
    ("vocab_size", "64", COUNT),
    ("vocab_size", 0, COUNT),
    ("hidden_size", -32, COUNT),
    ("hidden_size", 0, COUNT),
    ("intermediate_size", 0, COUNT),
    ("intermediate_size", -1, COUNT),
    ("intermediate_size", 48.0, COUNT),
    ("num_hidden_layers", True, COUNT),
    ("num_hidden_layers", 0, COUNT),
    ("num_attention_heads", -4, COUNT),
    ("num_attention_heads", 0, COUNT),
    ("num_attention_heads", [4], COUNT),
    ("num_key_value_heads", 0, COUNT),
    ("num_key_value_heads", -2, COUNT),
    ("num_key_value_heads", 3, "must divide num_attention_heads 4"),
    ("head_dim", 0, COUNT),
    ("head_dim", -8, COUNT),
    ("head_dim", "8", COUNT),
    ("head_dim", 7, "must be even"),
    ("max_position_embeddings", 0, COUNT),
    ("max_position_embeddings", -1, COUNT),
    ("max_position_embeddings", "2048", COUNT),
    ("rms_norm_eps", "small", NUMBER),
    ("rms_norm_eps", -1e-6, NUMBER),
    ("rms_norm_eps", float("nan"), NUMBER),
    ("rope_theta", 0, NUMBER),
    ("rope_theta", "10000", NUMBER),
    ("rope_theta", float("inf"), NUMBER),
    ("rope_scaling", "linear", MAPPING),
    ("rope_scaling", [1], MAPPING),
    ("rope_parameters", 3, MAPPING),
    ("hidden_act", 3, "must be a string"),
    ("mlp_bias", "no", "must be true or false"),
]
EAGLE3_VALUES = [
    ("eagle_config", "x", MAPPING),
    ("eagle_config", [1], MAPPING),
    ("eagle_config", 3, MAPPING),
    ("eagle_aux_hidden_state_layer_ids", 5, WHOLE_NUMBERS),
    ("eagle_aux_hidden_state_layer_ids", "2,4,5", WHOLE_NUMBERS),
    ("eagle_aux_hidden_state_layer_ids", [1, "3", 4], WHOLE_NUMBERS),
    ("eagle_aux_hidden_state_layer_ids", [True, 3, 4], WHOLE_NUMBERS),
    ("eagle_aux_hidden_state_layer_ids", {"a": 1}, WHOLE_NUMBERS),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {kind: make_head(kind, folder / kind) for kind in ("medusa", "eagle", "eagle3", "redrafter")}


def refusal(heads: dict[str, Path], target: Path, kind: str, changes: dict[str, Any]) -> str:
    """Return what is said of a head with these values in its config.json."""
    file = heads[kind] / "config.json"
    kept = file.read_text()
    file.write_text(json.dumps(json.loads(kept) | changes))
    try:
        with pytest.raises(ConfigError) as error:
            load(kind, heads[kind], target)
    finally:
        file.write_text(kept)
    assert "\n" not in str(error.value)
    assert str(heads[kind]) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(("key", "value", "words"), EAGLE_VALUES)
def test_value_that_cannot_be_is_named(
    heads: dict[str, Path], target: Path, kind: str, key: str, value: Any, words: str
) -> None:
    said = refusal(heads, target, kind, {key: value})
    assert f"{key} {words}" in said
    assert f"got {value!r} " in said
    assert f"({heads[kind]}/config.json)" in said


@pytest.mark.parametrize(("key", "value", "words"), EAGLE3_VALUES)
def test_eagle3_layout_that_cannot_be_is_named(
    heads: dict[str, Path], target: Path, key: str, value: Any, words: str
) -> None:
    said = refusal(heads, target, "eagle3", {key: value})
    wrong = (
        next((item for item in value if type(item) is not int), value)
        if isinstance(value, list) and value != [1]
        else value
    )
    assert f"{key} {words}, got {wrong!r} ({heads['eagle3']}/config.json)" in said


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "redrafter"])
def test_the_sharpness_of_a_head_is_read_or_1(heads: dict[str, Path], target: Path, kind: str) -> None:
    given = {"sharpness": {"argmax": 0.25}}
    assert "sharpness.argmax must be a number in 0.01..1, got 0" in refusal(
        heads, target, kind, {"sharpness": {"argmax": 0}}
    )
    config = json.loads((heads[kind] / "config.json").read_text())
    (heads[kind] / "config.json").write_text(json.dumps(config | given))
    try:
        assert load(kind, heads[kind], target).sharpness == Sharpness(0.25, 1.0)
    finally:
        (heads[kind] / "config.json").write_text(json.dumps(config))
    assert load(kind, heads[kind], target).sharpness == Sharpness(1.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("medusa", "target_fingerprint", 12, "must be a string, got 12"),
        ("medusa", "vocab_size", [64], "must be an integer"),
        ("medusa", "accuracy", [[10**400]], "must be lists of shares"),
        ("redrafter", "hidden_size", "32", "must be an integer"),
        ("redrafter", "hidden_size", 0, "must be an integer"),
        ("eagle", "reads_token", "no", "must be true or false, got 'no'"),
        ("eagle3", "sharpness", 0.3, "must be an object"),
    ],
)
def test_other_values_are_named(
    heads: dict[str, Path], target: Path, kind: str, key: str, value: Any, words: str
) -> None:
    assert f"{key} {words}" in refusal(heads, target, kind, {key: value})


@pytest.mark.parametrize("key", ["intermediate_size", "num_attention_heads", "head_dim"])
def test_sizes_beyond_all_memory_are_no_traceback(heads: dict[str, Path], target: Path, key: str) -> None:
    assert "config.json" in refusal(heads, target, "eagle", {key: 10**30})
