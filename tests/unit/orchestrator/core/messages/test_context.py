"""The context delta, and the call that releases a sequence."""

from __future__ import annotations

import numpy as np

from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of, pack_release, released_sequence
from orchestrator.core.messages.drafter import DraftRequest, pack_draft_request, unpack_draft_request
from orchestrator.core.sampling_params import Sampling
from tests.unit.orchestrator.core.messages.strategies import crossed, full_step


def test_hash_covers_the_tokens_before_the_start() -> None:
    context = Context([7, 8, 9, 10])
    delta = delta_of(context, 2, 1, "")
    assert (delta.context_start, delta.context_ids.tolist(), delta.prefix_len) == (2, [9, 10], 4)
    assert delta.context_hash == Context([7, 8]).rolling_hash(2)
    assert delta.context_hash != Context([8, 7]).rolling_hash(2)
    assert delta.context_hash != Context([0, 7, 8]).rolling_hash(3)


def test_sequence_ids_and_seeds_use_all_64_bits() -> None:
    delta = delta_of(Context([1]), 0, 2**64 - 1, "")
    tensors = pack_draft_request(DraftRequest(delta, Sampling(1.0, seed=2**64 - 2), 1, 1))
    assert tensors["sequence_id"].dtype == tensors["seed"].dtype == np.uint64
    back = unpack_draft_request(tensors)
    assert (back.delta.sequence_id, back.sampling.seed) == (2**64 - 1, 2**64 - 2)


def test_release_is_distinguished_from_a_step() -> None:
    assert released_sequence(crossed(pack_release(2**64 - 1))) == 2**64 - 1
    assert released_sequence(full_step()) == 0
    assert released_sequence(pack_release(5) | {"release": np.array([False])}) == 0
