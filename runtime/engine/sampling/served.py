"""What rows of logits say, on their device: in C++ on the CPU, in torch on a GPU; equal up to the rounding of torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from native.sampling import TYPES, Rows, Step, Verified, sampler
from orchestrator.core.accept import accept_coupled
from orchestrator.core.arrays import IdArray
from orchestrator.core.sampling_params import Sampling
from runtime.engine.sampling import distribution, noise
from runtime.engine.sampling.accept import AcceptInput, accepted_paths
from runtime.engine.staging import staged

#: A call uses one of torch's threads for every this many logits.
NUMBERS_PER_THREAD = 1 << 21


def decide(inputs: Sequence[AcceptInput], logits: Sequence[Tensor], wanted: Sequence[bool]) -> list[Verified]:
    """Return what every step accepts under its own rule.

    logits: per input (m + 1, V), the processed logits of the root and the nodes, not changed. wanted: whether the
    input's target tokens are wanted.
    Invariant: each result depends only on its own input and rows.
    """
    if not inputs:
        return []
    if not on_cpu(logits[0]):
        return _decide_in_torch(inputs, logits, wanted)
    steps = [
        Step(rows_of(rows), each.tree, each.q, each.prefix_len, each.sampling, is_wanted)
        for each, rows, is_wanted in zip(inputs, logits, wanted, strict=True)
    ]
    return sampler().verify(steps, logits[0].shape[-1], _num_threads(sum(rows.numel() for rows in logits)))


def target_tokens(logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
    """Return the target token of every row: argmax(log p + noise), at temperature 0 the argmax; ties to the lowest id.

    logits: (n, V) in the model's dtype. positions: (n,), absolute position of the token that each row decides.
    samplings: (n,). Returns (n,) token ids.
    """
    if not on_cpu(logits):
        return distribution.target_tokens(logits, positions, samplings)
    return sampler().target_tokens(
        rows_of(logits), logits.shape[-1], positions, samplings, _num_threads(logits.numel())
    )


def log_p(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return log p per row, (n, V) float64, −inf outside its support; logits: (n, V). samplings: (n,)."""
    if not on_cpu(logits):
        return distribution.log_p(logits.double(), samplings)
    return torch.from_numpy(sampler().log_p(rows_of(logits), logits.shape[-1], samplings, _num_threads(logits.numel())))


def log_probs_of(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of one token per row by the raw logits, in float64.

    logits: (n, V). tokens: (n,) ids.
    """
    if not on_cpu(logits):
        return distribution.log_probs_of(logits, tokens)
    found: list[float] = sampler().log_probs(rows_of(logits), logits.shape[-1], tokens)[0].tolist()
    return found


def top_log_probs(logits: Tensor, num_top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable tokens of every row by the raw logits, in order; ties go to the lowest id.

    logits: (n, V). Returns ids (n, k) int32 and log-probabilities (n, k) float64; k = num_top, at most V.
    """
    if not on_cpu(logits):
        return distribution.top_log_probs(logits, num_top)
    vocab_size = logits.shape[-1]
    return sampler().log_probs(rows_of(logits), vocab_size, [0] * len(logits), min(num_top, vocab_size))[1:]


def top_ids(logits: Tensor, num_top: int) -> IdArray:
    """Return only the ids of `top_log_probs`, (n, k) int32, at a fraction of its cost."""
    num_top = min(num_top, logits.shape[-1])
    if not on_cpu(logits):
        return distribution.top_ids(logits, num_top).int().cpu().numpy()
    return sampler().top_ids(rows_of(logits), logits.shape[-1], len(logits), num_top)


def target_noise(seeds: Sequence[int], positions: Sequence[int], tokens: Tensor) -> Tensor:
    """Return the target's noise for the tokens of each row, (n, k) float64; seeds, positions: (n,). tokens: (n, k)."""
    if not on_cpu(tokens):
        column = staged(positions, tokens.device)[:, None]
        return noise.gumbel(noise.seed_words(seeds, tokens.device), column, tokens)
    return torch.from_numpy(sampler().noise(seeds, positions, tokens.numpy()))


def rows_of(logits: Tensor) -> Rows:
    """Return the rows of (n, V) logits on the CPU; a dtype that C++ does not read is converted to float32."""
    name = str(logits.dtype).removeprefix("torch.")
    logits = (logits if name in TYPES else logits.float()).contiguous()
    return Rows(logits.data_ptr(), name if name in TYPES else "float32", logits)


def on_cpu(tensor: Tensor) -> bool:
    """Return True if C++ can read the tensor."""
    return tensor.device.type == "cpu"


def _num_threads(num_numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), num_numbers // NUMBERS_PER_THREAD))


def _decide_in_torch(inputs: Sequence[AcceptInput], logits: Sequence[Tensor], wanted: Sequence[bool]) -> list[Verified]:
    tokens = _target_tokens_by_input(inputs, logits, wanted)
    paths = {i: accept_coupled(each.tree, tokens[i]) for i, each in enumerate(inputs) if each.is_coupled}
    if others := [i for i in range(len(inputs)) if i not in paths]:
        samplings = [sampling for i in others for sampling in inputs[i].samplings]
        log_probs = distribution.log_p(torch.cat([logits[i].double() for i in others]), samplings)
        paths |= zip(others, accepted_paths([inputs[i] for i in others], log_probs), strict=True)
    return [Verified(*paths[i], tokens[i] if is_wanted else None) for i, is_wanted in enumerate(wanted)]


def _target_tokens_by_input(
    inputs: Sequence[AcceptInput], logits: Sequence[Tensor], wanted: Sequence[bool]
) -> dict[int, list[int]]:
    """Return the target tokens of the inputs that need them, by index.

    Rows that processors have changed are float64, the others have the model's dtype; concatenated, all would become
    float64.
    """
    members = [i for i, each in enumerate(inputs) if each.is_coupled or wanted[i]]
    result: dict[int, list[int]] = {}
    for dtype in {logits[i].dtype for i in members}:
        group = [i for i in members if logits[i].dtype == dtype]
        positions = [position for i in group for position in inputs[i].positions]
        samplings = [sampling for i in group for sampling in inputs[i].samplings]
        tokens = iter(distribution.target_tokens(torch.cat([logits[i] for i in group]), positions, samplings))
        result |= {i: list(islice(tokens, len(logits[i]))) for i in group}
    return result
