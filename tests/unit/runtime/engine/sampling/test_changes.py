"""The processors of many requests together: each request gets its own changes, in as many operations as one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from auditor.reference.logits_processors import process_logits
from orchestrator.core.context import Context
from orchestrator.core.sampling_params import LogitsOptions, Sampling
from runtime.engine.sampling import changes as module
from runtime.engine.sampling.changes import Changes, processed
from runtime.engine.sampling.logits_processors import LogitsProcessors
from tests.support.launches import count

V, PROMPT, OUTPUT, PATHS = 30, [1, 2, 3, 4], [5, 6, 5], ((), (7,), (7, 6))
SAMPLINGS = (
    Sampling(repetition_penalty=1.5),
    Sampling(frequency_penalty=0.5, presence_penalty=0.25),
    Sampling(logits_options=LogitsOptions(bias=((3, 1.5), (9, -2.0)))),
    Sampling(logits_options=LogitsOptions(allowed=(1, 5, 9))),
    Sampling(logits_options=LogitsOptions(bad_words=((4,), (7, 6)))),
    Sampling(min_tokens=5, logits_options=LogitsOptions(end_ids=(2, 8))),
    Sampling(repetition_penalty=0.8, min_tokens=9, logits_options=LogitsOptions(allowed=(2,), end_ids=(2,))),
)
LEGAL = np.random.default_rng(0).random((len(PATHS), V)) < 0.5


def changes(sampling: Sampling, has_grammar: bool) -> Changes:
    context = Context(PROMPT)
    context.commit(OUTPUT)
    legal = LEGAL if has_grammar else None
    return LogitsProcessors(sampling, len(PROMPT)).changes(context, len(context), PATHS, legal)


def batch(number: int) -> tuple[list[Tensor], list[Changes | None]]:
    """Every third request has a grammar, every fifth no processors."""
    given = [changes(SAMPLINGS[i % len(SAMPLINGS)], i % 3 == 0) if i % 5 else None for i in range(number)]
    return [torch.randn(len(PATHS), V, generator=torch.Generator().manual_seed(i)) for i in range(number)], given


@pytest.mark.parametrize("max_cpu_numbers", [1, 3 * len(PATHS) * V, 1 << 18])
def test_each_request_of_a_batch_gets_its_own_changes(monkeypatch: pytest.MonkeyPatch, max_cpu_numbers: int) -> None:
    monkeypatch.setattr(module, "MAX_CPU_NUMBERS", max_cpu_numbers)
    logits, given = batch(22)
    before = [own.clone() for own in logits]
    for i, (own, found) in enumerate(zip(before, processed(logits, given), strict=True)):
        assert torch.equal(logits[i], own)
        if not i % 5:
            assert found is logits[i]
            continue
        for row, (path, legal) in enumerate(zip(PATHS, LEGAL, strict=True)):
            sampling, allowed = SAMPLINGS[i % len(SAMPLINGS)], legal if i % 3 == 0 else None
            expected = process_logits(own[row].double().numpy(), PROMPT, [*OUTPUT, *path], sampling, allowed)
            assert found[row].tolist() == expected.tolist(), (i, row)


def test_more_requests_take_no_more_operations_and_one_copy() -> None:
    """Each is a launch on a GPU."""
    logits, given = batch(42)
    found = count(lambda: processed(logits, given))
    assert (found.copies, found.waits) == (1, 0) and found.ops < 60
    assert found.ops == count(lambda: processed(logits[:21], given[:21])).ops


def test_no_request_and_no_changes_are_nothing_to_do() -> None:
    assert processed([], []) == []
    logits = [torch.zeros(1, V)]
    assert processed(logits, [None])[0] is logits[0]
