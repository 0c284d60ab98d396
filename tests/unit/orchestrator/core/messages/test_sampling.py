"""Sampling tensors: invalid ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.drafter import unpack_draft_request
from orchestrator.core.messages.target import unpack_step
from tests.unit.orchestrator.core.messages.strategies import MAX_NODES, VOCAB_SIZE, full_draft, full_step, ids_of


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rule", np.array([b"fair"], np.object_), "unknown rule 'fair'"),
        ("bias_ids", ids_of(1, 2), "2 bias_ids, but 0 bias_weights"),
        ("bad_word_lengths", ids_of(3), "bad_word_ids: lengths add up to 3, but there are 0"),
        ("bad_word_lengths", ids_of(-1), "bad_word_ids: lengths"),
    ],
)
def test_invalid_sampling_tensor_is_refused(name: str, value: np.ndarray, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        unpack_draft_request(full_draft() | {name: value})


def test_sampling_vector_of_another_length_is_refused() -> None:
    tensors = full_step() | {"sampling": np.ones(3, np.float32)}
    with pytest.raises(EngineError, match="temperature, top_k, top_p, min_p"):
        unpack_step(tensors, VOCAB_SIZE, MAX_NODES)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_sampling_that_is_no_finite_number_is_refused(place: int, value: float) -> None:
    vector = full_step()["sampling"].copy()
    vector[place] = value
    with pytest.raises(
        EngineError, match=f"{('temperature', 'top_k')[place]} must be a finite number in 0..inf, got {value}"
    ):
        unpack_step(full_step() | {"sampling": vector}, VOCAB_SIZE, MAX_NODES)
