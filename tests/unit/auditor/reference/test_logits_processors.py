"""What a request changes of single logits: the reference by hand, and the torch twin against it, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference.logits_processors import process_logits
from orchestrator.core.context import Context
from orchestrator.core.sampling_params import LogitsOptions, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.server.sampling_inputs import merged_bias
from runtime.engine.sampling.changes import processed
from runtime.engine.sampling.logits_processors import LogitsProcessors, processors_for
from tests.unit.orchestrator.core.test_tree import trees

V = 8
LOGITS = np.array([3.0, -2.0, 1.0, 0.5, 0.0, -1.0, 2.0, 0.25])
NONE = -np.inf


def changed(
    sampling: Sampling, prompt: Sequence[int] = (), output: Sequence[int] = (), legal: Any = None
) -> list[float]:
    row = process_logits(LOGITS.copy(), prompt, output, sampling, legal)
    return [float(x) for x in row]


def edited(**logits_options: Any) -> Sampling:
    min_tokens = logits_options.pop("min_tokens", 0)
    return Sampling(min_tokens=min_tokens, logits_options=LogitsOptions(**logits_options))


# The reference by hand


def test_nothing_asked_for_changes_nothing_and_the_logits_given_stay() -> None:
    assert changed(Sampling(1.0), [1, 2], [3]) == LOGITS.tolist()
    given_row = LOGITS.copy()
    process_logits(
        given_row, [0], [1], Sampling(repetition_penalty=2.0, logits_options=LogitsOptions(bias=((2, 1.0),)))
    )
    assert given_row.tolist() == LOGITS.tolist()


def test_repetition_is_of_prompt_and_output_and_pushes_down_on_either_side_of_zero() -> None:
    assert changed(Sampling(repetition_penalty=2.0), [0, 1], [6]) == [1.5, -4.0, 1.0, 0.5, 0.0, -1.0, 1.0, 0.25]


def test_frequency_and_presence_count_the_output_alone() -> None:
    output = [2, 2, 2, 5]
    assert changed(Sampling(frequency_penalty=0.5), [0, 2], output)[2] == 1.0 - 1.5
    assert changed(Sampling(presence_penalty=0.5), [0, 2], output)[:3] == [3.0, -2.0, 0.5]
    both = changed(Sampling(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0), [0], output)
    assert both == [1.5, -2.0, 0.5 - 1.5 - 0.25, 0.5, 0.0, -2.0 - 0.5 - 0.25, 2.0, 0.25]


def test_bias_is_added_behind_the_penalties() -> None:
    assert changed(Sampling(repetition_penalty=2.0, logits_options=LogitsOptions(bias=((0, -1.0),))), [0])[0] == 0.5
    assert merged_bias([(3, 1.0), (5, 2.0), (3, -0.25)]) == ((3, 0.75), (5, 2.0))


def test_masks_leave_what_they_allow() -> None:
    assert [i for i, x in enumerate(changed(edited(allowed=(2, 5)))) if x > NONE] == [2, 5]
    legal = np.arange(V) % 2 == 0
    assert [i for i, x in enumerate(changed(Sampling(), legal=legal)) if x > NONE] == [0, 2, 4, 6]
    assert [i for i, x in enumerate(changed(edited(allowed=(2, 5)), legal=legal)) if x > NONE] == [2]


@pytest.mark.parametrize(
    ("prompt", "output", "banned"),
    [
        ([], [], [6]),
        ([], [4], [6, 5]),
        ([4], [], [6, 5]),  # a bad word may begin in the prompt
        ([4], [5], [6]),
        ([], [1, 2], [6, 3]),
        ([1], [2], [6, 3]),
        ([], [2], [6]),
        ([], [1, 2, 2], [6]),
    ],
)
def test_a_bad_word_loses_its_last_token_where_the_others_stand(
    prompt: list[int], output: list[int], banned: list[int]
) -> None:
    row = changed(edited(bad_words=((6,), (4, 5), (1, 2, 3))), prompt, output)
    assert {i for i, x in enumerate(row) if x == NONE} == set(banned)


def test_no_end_before_min_tokens() -> None:
    sampling = edited(end_ids=(0, 7), min_tokens=2)
    banned = [{i for i, x in enumerate(changed(sampling, [1], [3] * n)) if x == NONE} for n in range(4)]
    assert banned == [{0, 7}, {0, 7}, set(), set()]


@pytest.mark.parametrize(
    ("sampling", "legal", "left"),
    [
        # Only an end is legal, and no end may come yet: the grammar comes first.
        (edited(end_ids=(0,), min_tokens=5), [0], {0}),
        # The grammar leaves what is not allowed.
        (edited(allowed=(1, 2)), [3, 4], {3, 4}),
        # All that is allowed is a bad word.
        (edited(allowed=(6,), bad_words=((6,),)), range(V), {6}),
        (edited(allowed=(0, 6), bad_words=((6,),), end_ids=(0,), min_tokens=1), range(V), {0}),
    ],
)
def test_a_mask_that_would_leave_nothing_is_not_applied(sampling: Sampling, legal: Any, left: set[int]) -> None:
    row = changed(sampling, legal=np.isin(np.arange(V), list(legal)))
    assert {i for i, x in enumerate(row) if x > NONE} == left


# The twin


def legal_behind(output: Sequence[int]) -> np.ndarray:
    return (np.arange(V) + len(output)) % 3 > 0


ids = st.integers(0, V - 1)
words = st.lists(ids, min_size=1, max_size=3).map(tuple)
samplings = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    frequency_penalty=st.sampled_from([0.0, 0.75]),
    min_tokens=st.integers(0, 6),
    logits_options=st.builds(
        LogitsOptions,
        bias=st.lists(st.tuples(ids, st.floats(-3, 3)), max_size=3, unique_by=lambda pair: pair[0]).map(tuple),
        allowed=st.lists(ids, max_size=5).map(tuple),
        bad_words=st.lists(words, max_size=4).map(tuple),
        end_ids=st.lists(ids, max_size=2).map(tuple),
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    samplings,
    trees(),
    st.lists(ids, min_size=1, max_size=6),
    st.lists(st.lists(ids, max_size=4), max_size=3),
    st.booleans(),
)
def test_the_twin_equals_the_reference_at_every_node_step_by_step(
    sampling: Sampling, tree: TokenTree, prompt: list[int], steps: list[list[int]], with_grammar: bool
) -> None:
    """Bitwise: the same operations on the same numbers."""
    context = Context(prompt)
    logits_processors = LogitsProcessors(sampling, len(prompt))
    rng = np.random.default_rng(1)
    for committed in [[], *steps]:
        context.commit(committed)
        rows = rng.normal(size=(tree.num_nodes + 1, V)) * 3
        ours = torch.from_numpy(rows.copy())
        legal_rows = np.stack([legal_behind([*context.output, *path]) for path in tree.paths])
        changes = logits_processors.changes(context, len(context), tree.paths, legal_rows if with_grammar else None)
        ours = processed([ours], [changes])[0]
        for row, path, own in zip(rows, tree.paths, ours.numpy(), strict=True):
            output = [*context.output, *path]
            legal = legal_behind(output) if with_grammar else None
            np.testing.assert_array_equal(own, process_logits(row, prompt, output, sampling, legal))


def test_the_twin_follows_a_context_that_was_taken_back() -> None:
    sampling = Sampling(frequency_penalty=1.0)
    logits_processors, context = LogitsProcessors(sampling, 1), Context([0])
    for kept, new in ((1, [2, 2, 3]), (2, [4]), (2, [4, 4, 4]), (1, [5, 5, 5, 5])):
        context.truncate(kept)
        context.commit(new)
        ours = torch.zeros(1, V, dtype=torch.float64)
        ours = processed([ours], [logits_processors.changes(context, len(context), [()])])[0]
        assert ours[0].tolist() == [-float(context.output.count(token)) for token in range(V)]


def test_the_twin_leaves_what_lies_behind_the_prefix_to_the_paths() -> None:
    """A draft engine's context holds its drafts; they count by the path alone."""
    logits_processors, context = LogitsProcessors(Sampling(frequency_penalty=1.0), 1), Context([0])
    context.commit([2, 3, 3])
    ours = torch.zeros(1, V, dtype=torch.float64)
    ours = processed([ours], [logits_processors.changes(context, 2, [[3, 3]])])[0]
    assert ours[0].tolist() == [0, 0, -1, -2, 0, 0, 0, 0]


def test_processors_are_kept_from_step_to_step_and_made_anew_for_another_sampling() -> None:
    first = processors_for(Sampling(repetition_penalty=1.5), 3, None)
    assert first is not None and processors_for(Sampling(repetition_penalty=1.5), 3, first) is first
    assert processors_for(Sampling(repetition_penalty=1.2), 3, first) not in (None, first)
    assert processors_for(Sampling(1.0, top_k=3), 3, first) is None
