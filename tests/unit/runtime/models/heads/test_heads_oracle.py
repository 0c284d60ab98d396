"""The oracle of the drafting heads against numbers worked by hand, and the written checkpoints against their layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.core import static_trees
from tests.support import heads_oracle as oracle
from tests.support.choice_trees import Tree, published_choices, tree_of_choices
from tests.support.dynamic_tree import dynamic_tree
from tests.support.published_heads import write_eagle, write_eagle3, write_medusa, write_redrafter

pytestmark = pytest.mark.unit

TARGET: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
}
LN2 = np.log(2.0)
RNG = np.random.default_rng(5)
EMBEDDING = RNG.normal(size=(30, 16))
LM_HEAD = RNG.normal(size=(30, 16))
FEATURES = RNG.normal(size=(6, 16))
WIDE = RNG.normal(size=(6, 48))
TOKENS = [3, 1, 4, 1, 5, 9]


# Files


def test_medusa_names_and_shapes(tmp_path: Path) -> None:
    tensors = oracle.read_tensors(write_medusa(tmp_path, 6, 11, num_heads=3, num_layers=2))
    expected = {f"{k}.{i}.linear.weight": (6, 6) for k in range(3) for i in range(2)}
    expected |= {f"{k}.{i}.linear.bias": (6,) for k in range(3) for i in range(2)}
    expected |= {f"{k}.2.weight": (11, 6) for k in range(3)}
    assert {name: t.shape for name, t in tensors.items()} == expected
    assert np.array_equal(tensors["1.0.linear.weight"], tensors["1.1.linear.weight"])
    assert not np.array_equal(tensors["0.0.linear.weight"], tensors["1.0.linear.weight"])


def test_eagle_names_and_shapes(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, TARGET, num_layers=2, qkv_bias=True, file="safetensors")
    shapes = {name: t.shape for name, t in oracle.read_tensors(folder).items()}
    layer = {
        "self_attn.q_proj.weight": (16, 16),
        "self_attn.q_proj.bias": (16,),
        "self_attn.k_proj.weight": (8, 16),
        "self_attn.k_proj.bias": (8,),
        "self_attn.v_proj.weight": (8, 16),
        "self_attn.v_proj.bias": (8,),
        "self_attn.o_proj.weight": (16, 16),
        "mlp.gate_proj.weight": (24, 16),
        "mlp.up_proj.weight": (24, 16),
        "mlp.down_proj.weight": (16, 24),
        "post_attention_layernorm.weight": (16,),
    }
    assert shapes == {
        "embed_tokens.weight": (30, 16),
        "fc.weight": (16, 32),
        "fc.bias": (16,),
        "layers.1.input_layernorm.weight": (16,),
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }


def test_eagle3_names_and_shapes(tmp_path: Path) -> None:
    tensors = oracle.read_tensors(write_eagle3(tmp_path, TARGET, 12, hidden_size=8, changes={"head_dim": 6}))
    assert {name: t.shape for name, t in tensors.items()} == {
        "embed_tokens.weight": (30, 8),
        "fc.weight": (8, 48),
        "midlayer.hidden_norm.weight": (8,),
        "midlayer.input_layernorm.weight": (8,),
        "midlayer.self_attn.q_proj.weight": (24, 16),
        "midlayer.self_attn.k_proj.weight": (12, 16),
        "midlayer.self_attn.v_proj.weight": (12, 16),
        "midlayer.self_attn.o_proj.weight": (8, 24),
        "midlayer.mlp.gate_proj.weight": (24, 8),
        "midlayer.mlp.up_proj.weight": (24, 8),
        "midlayer.mlp.down_proj.weight": (8, 24),
        "midlayer.post_attention_layernorm.weight": (8,),
        "norm.weight": (8,),
        "lm_head.weight": (12, 8),
        "d2t": (12,),
        "t2d": (30,),
    }
    config = oracle.read_config(tmp_path)
    assert (config["hidden_size"], config["target_hidden_size"], config["draft_vocab_size"]) == (8, 16, 12)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    assert np.array_equal(np.flatnonzero(tensors["t2d"]), oracle.draft_to_target(tensors))


def test_eagle3_without_map_or_embedding(tmp_path: Path) -> None:
    tensors = oracle.read_tensors(write_eagle3(tmp_path, TARGET, 30))
    assert not {"d2t", "t2d", "embed_tokens.weight", "fc.bias"} & set(tensors)
    assert np.array_equal(oracle.draft_to_target(tensors), np.arange(30))


def test_redrafter_names_and_shapes(tmp_path: Path) -> None:
    tensors = oracle.read_tensors(write_redrafter(tmp_path, 4, 11, num_layers=2, exit_dim=6))
    assert {name: t.shape for name, t in tensors.items()} == {
        "input_proj.weight": (6, 8),
        "input_proj.bias": (6,),
        "lm_head.0.linear.weight": (6, 6),
        "lm_head.0.linear.bias": (6,),
        "lm_head.1.linear.weight": (6, 6),
        "lm_head.1.linear.bias": (6,),
        "lm_head.2.weight": (11, 6),
        "rnn_u.weight": (4, 4),
        "rnn_u.bias": (4,),
        "rnn_w.weight": (4, 4),
    }
    plain = oracle.read_tensors(write_redrafter(tmp_path / "plain", 4, 11, rnn=False))
    assert set(plain) == {"lm_head.0.linear.weight", "lm_head.0.linear.bias", "lm_head.1.weight"}


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "redrafter"])
def test_both_files_hold_the_same(tmp_path: Path, method: str) -> None:
    write = {
        "medusa": lambda folder, file: write_medusa(folder, 4, 7, 2, file=file),
        "eagle": lambda folder, file: write_eagle(folder, TARGET, file=file),
        "eagle3": lambda folder, file: write_eagle3(folder, TARGET, 9, file=file),
        "redrafter": lambda folder, file: write_redrafter(folder, 4, 7, file=file),
    }[method]
    one, two = (oracle.read_tensors(write(tmp_path / file, file)) for file in ("safetensors", "pt"))
    assert {name: t.tolist() for name, t in one.items()} == {name: t.tolist() for name, t in two.items()}


def test_config_may_name_fewer_heads_and_float16_is_stored(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path, 4, 7, num_heads=5, config_num_heads=2, dtype="float16")
    assert oracle.read_config(folder)["medusa_num_heads"] == 2
    tensors = oracle.read_tensors(folder)
    assert len(oracle.medusa_logits(tensors, np.ones(4))) == 5
    assert all(np.array_equal(t, t.astype(np.float16)) for t in tensors.values())


# Medusa


def test_medusa_with_zero_blocks_is_the_lm_head() -> None:
    tensors = {"0.0.linear.weight": np.zeros((2, 2)), "0.0.linear.bias": np.zeros(2), "0.1.weight": np.eye(3, 2)}
    assert oracle.medusa_logits(tensors, np.array([2.0, -3.0])).tolist() == [[2.0, -3.0, 0.0]]


def test_medusa_by_hand() -> None:
    # W h + b = (ln 2, 0); SiLU(ln 2) = ln 2 · 2/3; x = (1 + 2/3 ln 2, 1).
    tensors = {"0.0.linear.weight": np.array([[LN2, 0.0], [0.0, 0.0]]), "0.0.linear.bias": np.zeros(2)}
    logits = oracle.medusa_logits(tensors, np.ones(2), lm_head=np.array([[1.0, 0.0], [1.0, 1.0]]))
    assert logits == pytest.approx(np.array([[1 + 2 / 3 * LN2, 2 + 2 / 3 * LN2]]), abs=1e-15)


def test_medusa_bias_counts_and_layers_are_counted_per_head(tmp_path: Path) -> None:
    h = RNG.normal(size=6)
    two = oracle.read_tensors(write_medusa(tmp_path / "two", 6, 9, 2, num_layers=2, repeated_block=False))
    x = h
    for layer in range(2):
        pre = two[f"1.{layer}.linear.weight"] @ x + two[f"1.{layer}.linear.bias"]
        x = x + pre / (1 + np.exp(-pre))
    assert oracle.medusa_logits(two, h)[1] == pytest.approx(two["1.2.weight"] @ x, abs=1e-12)
    none = oracle.read_tensors(write_medusa(tmp_path / "none", 6, 9, 2, num_layers=0))
    assert oracle.medusa_logits(none, h)[1] == pytest.approx(none["1.0.weight"] @ h, abs=1e-12)


# A decoder layer


def test_rotation_by_hand() -> None:
    # e = 4, theta = 100: dimensions (0, 2) turn by position, (1, 3) by position / 10.
    x = np.array([[[1.0, 0.0, 0.0, 2.0]]])
    turned = oracle.rotate(x, np.array([3.0]), 100.0)[0, 0]
    assert turned == pytest.approx([np.cos(3), -2 * np.sin(0.3), np.sin(3), 2 * np.cos(0.3)], abs=1e-15)


def test_rms_norm_by_hand() -> None:
    assert oracle.rms_norm(np.array([3.0, 4.0]), np.array([1.0, 2.0]), 0.0) == pytest.approx(
        [3 / np.sqrt(12.5), 8 / np.sqrt(12.5)]
    )


def test_attention_by_hand() -> None:
    # Zero queries see every row alike, so that row i returns the mean of the first i + 1 values; o_proj doubles it.
    x = np.array([[1.0, 5.0], [3.0, 1.0], [8.0, 0.0]])
    tensors = {
        "q_proj.weight": np.zeros((2, 2)),
        "k_proj.weight": np.eye(2),
        "v_proj.weight": np.eye(2),
        "o_proj.weight": 2 * np.eye(2),
    }
    out = oracle.attention(tensors, "", {"num_attention_heads": 1}, x, np.arange(3.0))
    assert out == pytest.approx(np.array([[2.0, 10.0], [4.0, 6.0], [8.0, 4.0]]), abs=1e-12)


def test_query_heads_share_their_group_of_keys() -> None:
    # Values are the row number in group 0 and minus it in group 1; heads 0, 1 read group 0, heads 2, 3 group 1.
    x = np.array([[1.0], [3.0]])
    tensors = {
        "q_proj.weight": np.zeros((8, 1)),
        "k_proj.weight": np.zeros((4, 1)),
        "v_proj.weight": np.array([[1.0], [0.0], [-1.0], [0.0]]),
        "o_proj.weight": np.eye(8),
    }
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    out = oracle.attention(tensors, "", config, x, np.arange(2.0))
    assert out.tolist() == [[1, 0, 1, 0, -1, 0, -1, 0], [2, 0, 2, 0, -2, 0, -2, 0]]


def test_only_distances_matter_to_attention() -> None:
    tensors = {f"{n}_proj.weight": RNG.normal(size=(4, 4)) for n in "qkvo"}
    config = {"num_attention_heads": 2, "rope_theta": 50.0}
    x = RNG.normal(size=(5, 4))
    here = oracle.attention(tensors, "", config, x, np.arange(5.0))
    assert oracle.attention(tensors, "", config, x, np.arange(5.0) + 700) == pytest.approx(here, abs=1e-9)
    assert not np.allclose(oracle.attention(tensors, "", config, x, np.arange(5.0) * 2), here)


def test_a_decoder_layer_is_that_of_transformers() -> None:
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(3)
    sizes = TARGET | {"rms_norm_eps": 1e-5, "head_dim": 6, "attention_bias": True, "initializer_range": 0.5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
    model = LlamaModel(LlamaConfig(**sizes, **rope, num_hidden_layers=1)).double().eval()
    torch.nn.init.normal_(model.layers[0].self_attn.q_proj.bias)
    tensors = {name: t.detach().numpy() for name, t in model.layers[0].state_dict().items()}
    x = RNG.normal(size=(7, 16))
    with torch.no_grad():
        expected = model(inputs_embeds=torch.from_numpy(x)[None]).last_hidden_state[0].numpy()
    config = sizes | {"rope_theta": 300.0}
    normed = oracle.rms_norm(x, tensors["input_layernorm.weight"], 1e-5)
    y = x + oracle.attention(tensors, "self_attn.", config, normed, np.arange(7.0))
    y = oracle.rest_of_layer(tensors, "", config, y)
    # transformers takes its RoPE angles and its norms' means in float32.
    assert oracle.rms_norm(y, np.ones(16), 1e-5) == pytest.approx(expected, abs=2e-5)


# EAGLE


def bare_eagle(size: int = 2) -> dict[str, np.ndarray]:
    """Return a head whose layer adds nothing: its output is fc's."""
    tensors = {f"layers.0.self_attn.{n}_proj.weight": np.zeros((size, size)) for n in "qkvo"}
    tensors |= {f"layers.0.mlp.{n}_proj.weight": np.zeros((size, size)) for n in ("gate", "up", "down")}
    return tensors | {"layers.0.post_attention_layernorm.weight": np.ones(size)}


def test_eagle_fc_reads_the_embedding_first() -> None:
    # fc = 10 · embedding + feature: from feature (1, 2) and root 1: (1, 2) + 10 · (0, 1) = (1, 12); then token 0 on it.
    tensors = bare_eagle() | {"fc.weight": np.hstack([10 * np.eye(2), np.eye(2)]), "fc.bias": np.array([0.0, 0.5])}
    embedding = np.array([[1.0, 0.0], [0.0, 1.0]])
    config = {"num_attention_heads": 1}
    args = (tensors, config, embedding, np.array([[1.0, 2.0]]), [1], [0])
    assert oracle.eagle_features(*args).tolist() == [[1.0, 12.5], [11.0, 13.0]]
    lm_head = np.array([[1.0, 1.0]])
    logits = oracle.eagle_logits(*args[:3], lm_head, *args[3:])
    assert logits.tolist() == [[13.5], [24.0]]


def test_eagle_first_layer_has_no_input_norm_and_later_ones_do(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, TARGET, num_layers=2)
    tensors, config = oracle.read_tensors(folder), oracle.read_config(folder)
    base = oracle.eagle_features(tensors, config, EMBEDDING, FEATURES, TOKENS)
    stray = tensors | {"layers.0.input_layernorm.weight": np.full(16, 7.0)}
    assert np.array_equal(oracle.eagle_features(stray, config, EMBEDDING, FEATURES, TOKENS), base)
    later = tensors | {"layers.1.input_layernorm.weight": np.full(16, 7.0)}
    assert not np.allclose(oracle.eagle_features(later, config, EMBEDDING, FEATURES, TOKENS), base)


@pytest.mark.parametrize("width", [16, 48], ids=["eagle", "eagle3"])
def test_entries_see_the_past_and_stand_at_their_index(tmp_path: Path, width: int) -> None:
    if width == 16:
        folder, rows, run = write_eagle(tmp_path, TARGET), FEATURES, oracle.eagle_features
    else:
        folder, rows, run = write_eagle3(tmp_path, TARGET, 12), WIDE, oracle.eagle3_outputs
    tensors, config = oracle.read_tensors(folder), oracle.read_config(folder)
    full = run(tensors, config, EMBEDDING, rows, TOKENS)
    assert np.array_equal(run(tensors, config, EMBEDDING, rows, TOKENS, positions=range(6)), full)
    changed = rows.copy()
    changed[0] += 1.0
    assert not np.allclose(run(tensors, config, EMBEDDING, changed, TOKENS), full)
    # A hole keeps its position: leaving entry 2 out is not the same as closing the gap.
    kept = [0, 1, 3, 4, 5]
    tokens = [TOKENS[i] for i in kept]
    hole = run(tensors, config, EMBEDDING, rows[kept], tokens, [7, 8], positions=kept)
    closed = run(tensors, config, EMBEDDING, rows[kept], tokens, [7, 8])
    assert not np.allclose(hole, closed)
    shifted = run(tensors, config, EMBEDDING, rows[kept], tokens, [7, 8], positions=[i + 90 for i in kept])
    assert shifted == pytest.approx(hole, abs=1e-9)


def test_no_entry_sees_a_later_one(tmp_path: Path) -> None:
    rows, changed = FEATURES, FEATURES + np.array([0, 0, 0, 0, 1, 1])[:, None]
    for folder, run in (
        (write_eagle(tmp_path / "1", TARGET, num_layers=2), oracle.eagle_layers),
        (write_eagle3(tmp_path / "3", TARGET, 12), oracle.eagle3_layer),
    ):
        tensors, config = oracle.read_tensors(folder), oracle.read_config(folder)
        before = run(tensors, config, rows, EMBEDDING[TOKENS], np.arange(6.0))
        after = run(tensors, config, changed, EMBEDDING[TOKENS], np.arange(6.0))
        assert np.array_equal(before[:4], after[:4])
        assert not np.isclose(before[4:], after[4:]).all(-1).any()


def test_drafted_entries_follow_the_true_ones() -> None:
    assert oracle.entry_positions(3, 2, None).tolist() == [0, 1, 2, 3, 4]
    assert oracle.entry_positions(3, 2, [0, 4, 6]).tolist() == [0, 4, 6, 7, 8]


def test_eagle_feeds_its_own_feature_back(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, TARGET, bias=False)
    tensors, config = oracle.read_tensors(folder), oracle.read_config(folder)
    assert "fc.bias" not in tensors and config["bias"] is False
    drafted = oracle.eagle_features(tensors, config, EMBEDDING, FEATURES, TOKENS, [7, 8])
    true = np.vstack([FEATURES, drafted[:2]])
    assert np.array_equal(oracle.eagle_features(tensors, config, EMBEDDING, true, [*TOKENS, 7, 8])[0], drafted[2])
    # The file's own embedding goes before the target's.
    other = oracle.eagle_features(tensors, config, EMBEDDING + 1.0, FEATURES, TOKENS, [7, 8])
    assert np.array_equal(other, drafted)


# EAGLE-3


def test_eagle3_by_hand() -> None:
    # The layer adds nothing: its output is fc's (the sum of the thirds) and stays un-normed when fed back.
    prefix = "midlayer."
    tensors = {prefix + k.removeprefix("layers.0."): v for k, v in bare_eagle().items()}
    tensors |= {f"{prefix}self_attn.{n}_proj.weight": np.zeros((2, 4)) for n in "qkv"}
    tensors |= {prefix + "input_layernorm.weight": np.ones(2), prefix + "hidden_norm.weight": np.ones(2)}
    tensors |= {"fc.weight": np.hstack([np.eye(2)] * 3), "norm.weight": np.array([1.0, 2.0])}
    tensors |= {"lm_head.weight": np.eye(2), "d2t": np.array([1, 2])}
    config = {"num_attention_heads": 1, "rms_norm_eps": 0.0}
    features = np.array([[1.0, 1.0, 1.0, 2.0, 1.0, 1.0]])
    args = (tensors, config, np.ones((4, 2)), features, [0], [3])
    assert oracle.eagle3_outputs(*args).tolist() == [[3.0, 4.0], [3.0, 4.0]]
    root = np.sqrt(12.5)
    logits = oracle.eagle3_logits(*args)
    assert logits == pytest.approx(np.array([[3 / root, 8 / root]] * 2), abs=1e-15)
    spread = oracle.over_target(tensors, logits[0], 4)
    assert spread[[1, 3]] == pytest.approx([3 / root, 8 / root]) and np.isneginf(spread[[0, 2]]).all()


def test_eagle3_attends_over_embedding_then_hidden(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, TARGET, 12)
    tensors, config = oracle.read_tensors(folder), oracle.read_config(folder)
    base = oracle.eagle3_outputs(tensors, config, EMBEDDING, WIDE, TOKENS)
    # A normed half does not see its scale (up to epsilon); the residual, which is not normed, does.
    assert oracle.eagle3_outputs(tensors, config, 3 * EMBEDDING, WIDE, TOKENS) == pytest.approx(base, abs=1e-4)
    assert not np.allclose(oracle.eagle3_outputs(tensors, config, EMBEDDING, 3 * WIDE, TOKENS), base)
    # With the first half of the columns at zero the embedding no longer counts.
    blind = dict(tensors)
    for name in ("q", "k", "v"):
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"].copy()
        weight[:, :16] = 0.0
        blind[f"midlayer.self_attn.{name}_proj.weight"] = weight
    first, second = (oracle.eagle3_outputs(blind, config, e, WIDE, TOKENS) for e in (EMBEDDING, LM_HEAD))
    assert np.array_equal(first, second)


def test_eagle3_drafted_entry_takes_the_unnormed_output(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, TARGET, 12, layer_prefix="layers.0.")
    tensors, config = oracle.read_tensors(folder), oracle.read_config(folder)
    outputs = oracle.eagle3_outputs(tensors, config, EMBEDDING, WIDE, TOKENS, [7])
    fused = np.vstack([WIDE @ tensors["fc.weight"].T, outputs[:1]])
    again = oracle.eagle3_layer(tensors, config, fused, EMBEDDING[[*TOKENS, 7]], np.arange(7.0))
    assert np.array_equal(again[-1], outputs[1])


# ReDrafter


def tiny_redrafter() -> tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray, np.ndarray]:
    """Return tensors, configuration, embedding (3, 1) and h (1,) of a drafter whose sums fit on a line."""
    tensors = {
        "rnn_w.weight": np.array([[1.0]]),
        "rnn_u.weight": np.array([[2.0]]),
        "rnn_u.bias": np.array([LN2]),
        "lm_head.0.weight": np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
    }
    config = {"rnn": True, "num_draft_layers": 0, "exit_dim": 2}
    return tensors, config, np.array([[0.0], [LN2], [-LN2]]), np.array([5.0])


def test_redrafter_by_hand() -> None:
    tensors, config, embedding, h = tiny_redrafter()
    # s_1 = SiLU(e(0) + U·0 + b) = SiLU(ln 2) = 2/3 ln 2: the bias counts in the first step too.
    first = 2 / 3 * LN2
    assert oracle.redrafter_logits(tensors, config, embedding, h, 0) == pytest.approx([5, first, 5 + first])
    # s_2 = SiLU(e(2) + 2 s_1 + b) = SiLU(4/3 ln 2).
    second = 4 / 3 * LN2 / (1 + 2 ** (-4 / 3))
    assert oracle.redrafter_logits(tensors, config, embedding, h, 0, [2]) == pytest.approx([5, second, 5 + second])
    # Without the recurrent weights the state is the running sum of embeddings.
    plain = config | {"rnn": False}
    assert oracle.redrafter_logits(tensors, plain, embedding, h, 1, [1]) == pytest.approx([5, 2 * LN2, 5 + 2 * LN2])


def test_redrafter_projects_iff_its_width_differs(tmp_path: Path) -> None:
    h, embedding = RNG.normal(size=4), RNG.normal(size=(11, 4))
    folder = write_redrafter(tmp_path, 4, 11, exit_dim=6)
    tensors, config = oracle.read_tensors(folder), oracle.read_config(folder)
    pre = tensors["rnn_w.weight"] @ embedding[2] + tensors["rnn_u.bias"]
    x = tensors["input_proj.weight"] @ np.concatenate([h, pre / (1 + np.exp(-pre))]) + tensors["input_proj.bias"]
    inner = tensors["lm_head.0.linear.weight"] @ x + tensors["lm_head.0.linear.bias"]
    expected = tensors["lm_head.1.weight"] @ (x + inner / (1 + np.exp(-inner)))
    assert oracle.redrafter_logits(tensors, config, embedding, h, 2) == pytest.approx(expected, abs=1e-12)


def test_beam_search_by_exhaustion(tmp_path: Path) -> None:
    h, embedding = RNG.normal(size=4), RNG.normal(size=(6, 4))
    folder = write_redrafter(tmp_path, 4, 6)
    model = (oracle.read_tensors(folder), oracle.read_config(folder), embedding, h, 2)

    def score(path: tuple[int, ...]) -> float:
        return sum(oracle.redrafter_log_probs(*model, path[:n])[path[n]] for n in range(len(path)))

    # As wide as all two-token paths, the search of three tokens misses nothing.
    every = sorted(((a, b, c) for a in range(6) for b in range(6) for c in range(6)), key=score, reverse=True)
    beams = oracle.redrafter_beams(*model, width=36, length=3)
    assert [path for path, _ in beams] == every[:36]
    assert [value for _, value in beams] == pytest.approx([score(path) for path in every[:36]], abs=1e-12)
    # Width 1 is greedy.
    path: tuple[int, ...] = ()
    for _ in range(3):
        path = (*path, int(oracle.redrafter_log_probs(*model, path).argmax()))
    assert oracle.redrafter_beams(*model, width=1, length=3)[0][0] == path


def test_the_authors_cut_keeps_ties_and_renormalises() -> None:
    tensors, config, embedding, h = tiny_redrafter()
    tensors["lm_head.0.weight"] = np.array([[0.2, 0.0], [0.4, 0.0], [0.2, 0.0], [0.0, 0.0]])
    probs = np.exp(oracle.redrafter_log_probs(tensors, config, embedding, h, 0, keep=2))
    e = np.e
    assert probs == pytest.approx(np.array([e, e * e, e, 0.0]) / (2 * e + e * e), abs=1e-15)


# Trees


# The published lists worked out by hand: rows are counted by depth, then by ranks, and the children of a row take the
# ranks 0, 1, 2, … without a gap. Medusa's: [0] … [9] are rows 1 … 10, [0, 0] … [0, 9] 11 … 20, [1, 0] is row 21,
# [2, 0] row 28, [0, 0, 0] row 39. EAGLE-1's: [0] … [3] are rows 1 … 4, [0, 0] row 5, [1, 0] row 8, [0, 0, 0] row 13,
# [0, 0, 0, 0] row 21.
MEDUSA_CHILDREN = {0: 10, 1: 10, 2: 7, 3: 3, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1}
MEDUSA_CHILDREN |= {11: 10, 12: 3, 13: 2, 14: 1, 15: 1, 16: 1, 17: 1, 18: 1, 21: 2, 28: 1, 39: 2}
EAGLE_CHILDREN = {0: 4, 1: 3, 2: 2, 3: 2, 4: 1, 5: 3, 6: 2, 7: 2, 8: 1, 13: 3, 21: 2}
PUBLISHED = [
    ("medusa_mc_sim_7b_63", MEDUSA_CHILDREN, [0] + [1] * 10 + [2] * 28 + [3] * 23 + [4] * 2, 42),
    ("eagle1_25", EAGLE_CHILDREN, [0] + [1] * 4 + [2] * 8 + [3] * 8 + [4] * 3 + [5] * 2, 15),
]


@pytest.mark.parametrize(("name", "children", "depths", "num_leaves"), PUBLISHED, ids=["medusa", "eagle"])
def test_published_trees(name: str, children: dict[int, int], depths: list[int], num_leaves: int) -> None:
    nodes = published_choices(name)
    leaves = [node for node in nodes if not any(other[:-1] == node for other in nodes)]
    parents = [row for row, count in children.items() for _ in range(count)]
    ranks = [rank for count in children.values() for rank in range(count)]
    assert len(leaves) == num_leaves and len(tree_of_choices(nodes).leaf_paths) == num_leaves
    for given in (nodes, leaves, nodes[::-1], leaves[::-1]):
        helper, tree = tree_of_choices(given), static_trees.tree_of_choices(given)
        assert (helper.parents, helper.depths) == (parents, depths)
        assert [address[-1] for address in helper.addresses[1:]] == ranks
        assert (tree.parents.tolist(), tree.depths.tolist(), tree.tokens.tolist()) == (parents, depths, ranks)
        # Who sees whom, by the published lists alone: a node sees the beginnings of its own list.
        paths = [list(path) for path in tree.paths]
        assert sorted(paths[1:]) == sorted(nodes)
        assert tree.mask.tolist() == [[own[: len(other)] == other for other in paths] for own in paths]
        assert helper.mask == tree.mask.tolist()


def test_leaf_paths_stand_for_their_nodes() -> None:
    tree = tree_of_choices([[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]])
    nodes = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]
    assert tree == Tree(tuple(nodes))
    assert tree.parents == [0, 0, 1, 1, 2, 2, 3, 4, 7]
    assert tree.leaf_paths == [[0, 2, 5], [0, 2, 6], [0, 1, 4, 8], [0, 1, 3, 7, 9]]


def test_dynamic_tree_by_hand() -> None:
    # One law after any token: p(0) = 1/2, p(1) = 1/4, p(2) = 1/8 (and 1/8 for 3); scores count halvings.
    law = np.log(np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8]))
    nodes = dynamic_tree(lambda path: law, top_k=2, levels=3, max_nodes=6)
    # Level 1 makes 0 (1), 1 (2); level 2 makes 00 (2), 01 (3), 10 (3), 11 (4) and leaves 00 and 01 open (10 ties, but
    # was made later); level 3 makes 000 (3), 001 (4), 010 (4), 011 (5). The six best: 1, 2, 2, 3, 3, 3.
    assert [path for path, _ in nodes] == [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    assert [score / np.log(0.5) for _, score in nodes] == pytest.approx([1, 2, 2, 3, 3, 3])


def test_dynamic_tree_keeps_every_ancestor_and_skips_what_the_draft_lacks(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, TARGET, 12)
    tensors, config = oracle.read_tensors(folder), oracle.read_config(folder)

    def after(path: tuple[int, ...]) -> np.ndarray:
        logits = oracle.eagle3_logits(tensors, config, EMBEDDING, WIDE, TOKENS, path)[-1]
        return oracle.over_target(tensors, oracle.log_softmax(logits), 30)

    paths = [path for path, _ in dynamic_tree(after, top_k=3, levels=4, max_nodes=15)]
    assert len(paths) == len(set(paths)) == 15 and max(map(len, paths)) > 1
    assert {path[:-1] for path in paths} <= {(), *paths}
    assert {token for path in paths for token in path} <= set(oracle.draft_to_target(tensors).tolist())
