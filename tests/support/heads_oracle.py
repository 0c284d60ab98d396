"""Plain forward passes of the drafting heads in float64 numpy: no cache, no batch, everything from scratch each time.

Written only from the papers' equations and docs/heads-formats.md. It reads raw tensors by their published names
and shares no code with the heads that it is compared with. Sizes: d hidden, V vocabulary, V_d draft vocabulary.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]
Config = Mapping[str, Any]

FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "pytorch_model.bin",
)
CUT = -50000.0


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of the weight file in `folder`: floating-point ones as float64, the rest as stored."""
    import torch
    from safetensors.torch import load_file

    path = next(folder / name for name in FILES if (folder / name).is_file())
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return {name: (t.double() if t.is_floating_point() else t).numpy() for name, t in state.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of `folder`."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def linear(tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    """Return x (…, in) times the weight `name` (out, in), plus its bias where there is one: (…, out)."""
    y = x @ tensors[name + ".weight"].T
    return y + tensors[name + ".bias"] if name + ".bias" in tensors else y


def silu(x: np.ndarray) -> np.ndarray:
    """Return x · sigmoid(x)."""
    return x / (1.0 + np.exp(-x))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return x (…, d) over the root of its mean square, times weight (d,)."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of logits x (…, V)."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# Medusa


def medusa_logits(tensors: Tensors, h: np.ndarray, lm_head: np.ndarray | None = None) -> np.ndarray:
    """Return every head's logits (K, V) at the final-norm state h (d,); heads without their own LM head use lm_head.

    Head k: x ← x + SiLU(W x + b) for each block, then its LM head (V, d). Only the file says how many there are.
    """
    rows = []
    for head in range(len({name.split(".")[0] for name in tensors})):
        x, layer = np.asarray(h, dtype=np.float64), 0
        while f"{head}.{layer}.linear.weight" in tensors:
            x = x + silu(linear(tensors, f"{head}.{layer}.linear", x))
            layer += 1
        own = tensors.get(f"{head}.{layer}.weight", lm_head)
        assert own is not None, "blocks only: the base LM head is needed"
        rows.append(own @ x)
    return np.stack(rows)


# A decoder layer


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotate x (n, heads, e) by its positions (n,): dimension j pairs with j + e/2, angle position · theta^(−2j/e)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(tensors: Tensors, prefix: str, config: Config, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return causal self-attention of the rows x (n, in) at `positions`: (n, d)."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    q = linear(tensors, prefix + "q_proj", x).reshape(len(x), heads, -1)
    k = linear(tensors, prefix + "k_proj", x).reshape(len(x), kv_heads, -1)
    v = linear(tensors, prefix + "v_proj", x).reshape(len(x), kv_heads, -1)
    assert config.get("rope_scaling") is None, "no published head scales its RoPE"
    theta = float(config.get("rope_theta") or 10000.0)
    q, k = rotate(q, positions, theta), rotate(k, positions, theta)
    out = np.zeros_like(q)
    for row, head in itertools.product(range(len(x)), range(heads)):
        group = head // (heads // kv_heads)
        scores = k[: row + 1, group] @ q[row, head] / np.sqrt(q.shape[-1])
        out[row, head] = np.exp(log_softmax(scores)) @ v[: row + 1, group]
    return linear(tensors, prefix + "o_proj", out.reshape(len(x), -1))


def mlp(tensors: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    """Return down(SiLU(gate(x)) · up(x)): (n, d)."""
    gate = silu(linear(tensors, prefix + "gate_proj", x))
    return linear(tensors, prefix + "down_proj", gate * linear(tensors, prefix + "up_proj", x))


def rest_of_layer(tensors: Tensors, prefix: str, config: Config, x: np.ndarray) -> np.ndarray:
    """Return x (n, d) after the second half of a decoder layer: x + MLP(norm(x))."""
    normed = rms_norm(x, tensors[prefix + "post_attention_layernorm.weight"], eps(config))
    return x + mlp(tensors, prefix + "mlp.", normed)


def eps(config: Config) -> float:
    """Return the norms' epsilon; the reference's default if the key is absent."""
    return float(config.get("rms_norm_eps", 1e-6))


def entry_positions(count: int, drafted: int, positions: Sequence[int] | None) -> np.ndarray:
    """Return the RoPE positions of `count` true entries (0, 1, … unless given, with gaps) and the drafted after."""
    true = list(range(count)) if positions is None else list(positions)
    assert len(true) == count
    return np.array(true + [true[-1] + 1 + i for i in range(drafted)], dtype=np.float64)


# EAGLE-1 and EAGLE-2


def eagle_layers(
    tensors: Tensors, config: Config, features: np.ndarray, embeddings: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Return the predicted features (n, d) of entries (feature_i, embedding(x_{i+1})), both (n, d)."""
    x = linear(tensors, "fc", np.concatenate([embeddings, features], axis=-1))
    for layer in itertools.takewhile(lambda i: f"layers.{i}.mlp.up_proj.weight" in tensors, itertools.count()):
        prefix = f"layers.{layer}."
        norm = tensors.get(prefix + "input_layernorm.weight") if layer else None
        inner = x if norm is None else rms_norm(x, norm, eps(config))
        x = x + attention(tensors, prefix + "self_attn.", config, inner, positions)
        x = rest_of_layer(tensors, prefix, config, x)
    return x


def eagle_features(
    tensors: Tensors,
    config: Config,
    embedding: np.ndarray,
    features: np.ndarray,
    tokens: Sequence[int],
    path: Sequence[int] = (),
    positions: Sequence[int] | None = None,
) -> np.ndarray:
    """Return the predicted features (len(path) + 1, d); row j is after the root and the first j drafted tokens.

    features (n, d) are the target's, after its final norm; tokens (n,) are x_{i+1} of entry i, the last one the root.
    A drafted token's entry pairs it with the feature predicted one row before.
    """
    table = tensors.get("embed_tokens.weight", embedding)
    rows, ids, predicted = list(np.asarray(features, dtype=np.float64)), list(tokens), []
    for step in range(len(path) + 1):
        where = entry_positions(len(features), step, positions)
        predicted.append(eagle_layers(tensors, config, np.stack(rows), table[ids], where)[-1])
        if step < len(path):
            rows.append(predicted[-1])
            ids.append(path[step])
    return np.stack(predicted)


def eagle_logits(
    tensors: Tensors,
    config: Config,
    embedding: np.ndarray,
    lm_head: np.ndarray,
    features: np.ndarray,
    tokens: Sequence[int],
    path: Sequence[int] = (),
    positions: Sequence[int] | None = None,
) -> np.ndarray:
    """Return logits (len(path) + 1, V): the target's LM head (V, d) on each predicted feature, without a norm."""
    return eagle_features(tensors, config, embedding, features, tokens, path, positions) @ lm_head.T


# EAGLE-3


def eagle3_layer(
    tensors: Tensors, config: Config, fused: np.ndarray, embeddings: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Return the layer's output before the norm (n, d), from fused features and embeddings, both (n, d)."""
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    halves = [
        rms_norm(embeddings, tensors[prefix + "input_layernorm.weight"], eps(config)),
        rms_norm(fused, tensors[prefix + "hidden_norm.weight"], eps(config)),
    ]
    attended = attention(tensors, prefix + "self_attn.", config, np.concatenate(halves, axis=-1), positions)
    residual = halves[1] if config.get("norm_before_residual") else fused
    return rest_of_layer(tensors, prefix, config, residual + attended)


def eagle3_fused(tensors: Tensors, config: Config, features: np.ndarray) -> np.ndarray:
    """Return fc of the features (n, 3 d_target), (n, d); normed first, as in EAGLE-3.1, if the config says so."""
    if config.get("fc_norm"):
        parts = np.split(features, 3, axis=-1)
        features = np.concatenate(
            [rms_norm(part, tensors[f"fc_norm.{i}.weight"], eps(config)) for i, part in enumerate(parts)], axis=-1
        )
    if config.get("norm_before_fc"):
        features = rms_norm(features, tensors["input_norm.weight"], eps(config))
    return linear(tensors, "fc", features)


def eagle3_outputs(
    tensors: Tensors,
    config: Config,
    embedding: np.ndarray | None,
    features: np.ndarray,
    tokens: Sequence[int],
    path: Sequence[int] = (),
    positions: Sequence[int] | None = None,
) -> np.ndarray:
    """Return the un-normed outputs (len(path) + 1, d); features (n, 3 d_target) are low, middle, high, in this order.

    True entries go through fc; a drafted token's entry takes the un-normed output of the row before it, or with
    `norm_output` that output after `norm`.
    """
    table = tensors.get("embed_tokens.weight", embedding)
    assert table is not None, "neither the file nor the target gives an embedding"
    rows = list(eagle3_fused(tensors, config, np.asarray(features, dtype=np.float64)))
    ids, outputs = list(tokens), list[np.ndarray]()
    for step in range(len(path) + 1):
        where = entry_positions(len(features), step, positions)
        outputs.append(eagle3_layer(tensors, config, np.stack(rows), table[ids], where)[-1])
        if step < len(path):
            is_normed = config.get("norm_output")
            rows.append(rms_norm(outputs[-1], tensors["norm.weight"], eps(config)) if is_normed else outputs[-1])
            ids.append(path[step])
    return np.stack(outputs)


def eagle3_logits(
    tensors: Tensors,
    config: Config,
    embedding: np.ndarray | None,
    features: np.ndarray,
    tokens: Sequence[int],
    path: Sequence[int] = (),
    positions: Sequence[int] | None = None,
) -> np.ndarray:
    """Return logits (len(path) + 1, V_d) over the draft vocabulary; path and tokens are target ids."""
    outputs = eagle3_outputs(tensors, config, embedding, features, tokens, path, positions)
    return linear(tensors, "lm_head", rms_norm(outputs, tensors["norm.weight"], eps(config)))


def draft_to_target(tensors: Tensors) -> np.ndarray:
    """Return the target id of every draft id (V_d,): draft id + d2t, or the id itself where there is no map."""
    ids = np.arange(len(tensors["lm_head.weight"]))
    return ids + tensors["d2t"] if "d2t" in tensors else ids


def over_target(tensors: Tensors, logits: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return draft logits (…, V_d) spread over the target's vocabulary (…, V), −inf where the draft has no token."""
    spread = np.full((*logits.shape[:-1], vocab_size), -np.inf)
    spread[..., draft_to_target(tensors)] = logits
    return spread


# ReDrafter


def redrafter_logits(
    tensors: Tensors, config: Config, embedding: np.ndarray, h: np.ndarray, root: int, path: Sequence[int] = ()
) -> np.ndarray:
    """Return logits (V,) of the token after root and path, at the final-norm state h (d,) and embedding (V, d).

    s_0 = 0; s_i = SiLU(W e(y_{i−1}) + U s_{i−1} + b), y_0 the root (without `rnn`: s_i = e(y_{i−1}) + s_{i−1});
    then cat(h, s_i) → input projection, if there is one → residual blocks → LM head.
    """
    state = np.zeros_like(h, dtype=np.float64)
    for token in (root, *path):
        if config["rnn"]:
            state = silu(linear(tensors, "rnn_w", embedding[token]) + linear(tensors, "rnn_u", state))
        else:
            state = embedding[token] + state
    x, layers = np.concatenate([h, state]), int(config["num_draft_layers"])
    if int(config["exit_dim"]) != 2 * len(h):
        x = linear(tensors, "input_proj", x)
    for layer in range(layers):
        x = x + silu(linear(tensors, f"lm_head.{layer}.linear", x))
    return tensors[f"lm_head.{layers}.weight"] @ x


def redrafter_log_probs(
    tensors: Tensors,
    config: Config,
    embedding: np.ndarray,
    h: np.ndarray,
    root: int,
    path: Sequence[int] = (),
    keep: int | None = None,
) -> np.ndarray:
    """Return log-probabilities (V,) after root and path; `keep` 50 is the authors' cut to the highest logits."""
    logits = redrafter_logits(tensors, config, embedding, h, root, path)
    if keep is not None and keep < len(logits):
        logits = logits - logits.max()
        logits = np.where(logits < np.sort(logits)[-keep], CUT, logits)
    return log_softmax(logits)


def redrafter_beams(
    tensors: Tensors,
    config: Config,
    embedding: np.ndarray,
    h: np.ndarray,
    root: int,
    width: int,
    length: int,
    keep: int | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """Return the `width` beams of `length` drafted tokens (root not counted), best first, with their log-probabilities.

    Each step scores every token after every beam and keeps the best; ties go to the better beam, then the lower id.
    """
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(length):
        grown = []
        for rank, (path, score) in enumerate(beams):
            after = redrafter_log_probs(tensors, config, embedding, h, root, path, keep)
            grown += [(-(score + after[token]), rank, token, (*path, token)) for token in range(len(after))]
        beams = [(path, -cost) for cost, _, _, path in sorted(grown)[:width]]
    return beams
