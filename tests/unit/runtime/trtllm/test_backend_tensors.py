"""The adapter of NVIDIA's backend: tensors against its configuration, acceptance against a stand-in that decodes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.context import Delta
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution, StepOptions
from runtime.trtllm.backend.tensors import OUTPUTS, Backend, read_acceptance, step_tensors

MODEL = json.loads((Path(__file__).resolve().parents[3] / "data/trtllm/tensorrt_llm.json").read_text())
INPUTS = {tensor["name"]: tensor for tensor in MODEL["inputs"]}
DTYPES = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}

BACKEND = Backend(vocab_size=100, max_seq_len=50, max_draft_len=8)
CONTEXT = np.array([11, 12, 13, 14], np.int32)
GREEDY, NOTHING_MORE = Sampling(), StepOptions()
DRAWN = Sampling(temperature=0.5, top_k=7, top_p=0.9, seed=3)


def step(drafts=(), sampling=GREEDY, options=NOTHING_MORE, tree=None, q=(), context=CONTEXT, start=0):
    delta = Delta(1, start, context[start:], 0, 2)
    return StepRequest(delta, TokenTree.chain(drafts) if tree is None else tree, sampling, options, 1000, q)


def answer(ids, **more):
    """Return a response as the backend gives it: [1, beams, length] and [1, beams]."""
    lengths = np.array([[len(ids)]], np.int32)
    return {"output_ids": np.array([[ids]], np.int32), "sequence_length": lengths, **more}


def read(new, drafts):
    """Return the acceptance of an answer that adds `new` to the context."""
    return read_acceptance(answer([*CONTEXT, *new]), drafts, CONTEXT, BACKEND)


def test_request_of_a_step_with_drafts():
    tensors = step_tensors(step([21, 22]), CONTEXT, BACKEND)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "input_ids": [[11, 12, 13, 14]],
        "input_lengths": [[4]],
        "request_output_len": [[3]],
        "draft_input_ids": [[21, 22]],
        "runtime_top_k": [[1]],
    }


def test_request_may_fill_the_engine_to_its_last_token():
    context = np.arange(48, dtype=np.int32)
    assert step_tensors(step([21], context=context), context, BACKEND)["request_output_len"].tolist() == [[2]]


def test_request_without_drafts_leaves_their_tensor_out():
    tensors = step_tensors(step(), CONTEXT, BACKEND)
    assert "draft_input_ids" not in tensors and "draft_logits" not in tensors
    assert tensors["request_output_len"].tolist() == [[1]]


def test_request_that_draws_names_all_that_shapes_p():
    tensors = step_tensors(step([21], DRAWN), CONTEXT, BACKEND)
    assert tensors["temperature"].tolist() == [[0.5]]
    assert tensors["runtime_top_k"].tolist() == [[7]]
    assert tensors["runtime_top_p"].tolist() == [[np.float32(0.9)]]
    assert tensors["seed"].tolist() == [[child_seed(3, 4)]]


def test_request_at_another_position_has_another_seed():
    longer = np.append(CONTEXT, np.int32(15))
    seeds = {int(step_tensors(step((), DRAWN, context=c), c, BACKEND)["seed"][0, 0]) for c in (CONTEXT, longer)}
    assert len(seeds) == 2


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN, Sampling(temperature=1.0, rule=Rule.REJECTION)])
@pytest.mark.parametrize("drafts", [(), (21,), range(8)])
@pytest.mark.parametrize("seed_input", ["seed", "random_seed"])
def test_request_has_the_names_types_and_dims_of_the_configuration(sampling, drafts, seed_input):
    backend = replace(BACKEND, seed_input=seed_input)
    tensors = step_tensors(step(drafts, sampling), CONTEXT, backend)
    for name, tensor in tensors.items():
        declared = INPUTS["seed" if name == seed_input else name]
        assert name in (declared["name"], declared.get("name_0_19"))
        assert tensor.dtype == DTYPES[declared["dtype"]], name
        assert len(tensor.shape) == 1 + len(declared["dims"]) and tensor.shape[0] == 1, name
        assert all(dim in (-1, size) for dim, size in zip(declared["dims"], tensor.shape[1:], strict=True)), name
        assert tensor.size, name
    required = {name for name, declared in INPUTS.items() if not declared["optional"]}
    assert required | {"input_ids"} <= tensors.keys()


def test_outputs_asked_for_are_those_of_the_configuration():
    declared = {tensor["name"]: tensor for tensor in MODEL["outputs"]}
    assert set(OUTPUTS) == {"output_ids", "sequence_length"} <= declared.keys()
    given = answer([1, 2])
    for name in OUTPUTS:
        assert given[name].dtype == DTYPES[declared[name]["dtype"]]
        assert given[name].ndim == 1 + len(declared[name]["dims"])


FORK = TokenTree(np.array([1, 2], np.int32), np.array([0, 0], np.int32))
Q = Distribution(np.array([21], np.int32), np.array([1.0], np.float32))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (step(tree=FORK), "trees that branch"),
        (step(range(9)), "room for 9 draft tokens (its max_draft_len is 8)"),
        (step([21, 22], context=np.arange(48, dtype=np.int32)), "room for 48 tokens and this step's"),
        (step([21], q=(Q,)), "rule that reads q"),
        (step([21], Sampling(rule=Rule.TYPICAL)), "rule 'typical'"),
        (step([21], Sampling(min_p=0.1)), "min_p or typical_p"),
        (step([21], Sampling(typical_p=0.5)), "min_p or typical_p"),
        (step([21], Sampling(presence_penalty=0.5)), "penalties, bias"),
        (step([21], Sampling(logits_options=LogitsOptions(bad_words=((1,),)))), "penalties, bias"),
        (step([21], Sampling(min_tokens=4, logits_options=LogitsOptions(end_ids=(2,)))), "min_tokens"),
        (step([21], options=StepOptions(target_tokens=True)), "target tokens, log-probabilities or features"),
        (step([21], options=StepOptions(features_from=0)), "target tokens, log-probabilities or features"),
    ],
)
def test_request_that_the_backend_cannot_serve_is_refused_by_name(request_, expected):
    with pytest.raises(EngineError) as caught:
        step_tensors(request_, request_.delta.context_ids, BACKEND)
    assert str(caught.value).startswith("the backend tensorrtllm has no ") and expected in str(caught.value)


@pytest.mark.parametrize(
    ("new", "path", "next_token"),
    [
        ([30], (), 30),
        ([21, 30], (1,), 30),
        ([21, 22, 30], (1, 2), 30),
        ([21, 22, 23, 30], (1, 2, 3), 30),
    ],
)
def test_answer_is_accepted_drafts_and_one_token_of_the_targets(new, path, next_token):
    acceptance = read(new, [21, 22, 23])
    assert (acceptance.path, acceptance.next_token) == (path, next_token)
    assert acceptance.tokens(TokenTree.chain([21, 22, 23])) == new


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "has no output_ids"),
        ({"output_ids": np.empty((1, 1, 0), np.int32)}, "has no output_ids"),
        (answer([30]), "do not begin with the input"),
        (answer([11, 12, 13, 15, 30]), "do not begin with the input"),
        (answer(CONTEXT), "0 new tokens that 2 drafts do not allow"),
        (answer([*CONTEXT, 21]), "1 new tokens that 2 drafts do not allow"),
        (answer([*CONTEXT, 22, 30]), "2 new tokens that 2 drafts do not allow"),
        (answer([*CONTEXT, 21, 22, 30, 31]), "4 new tokens that 2 drafts do not allow"),
        (answer([*CONTEXT, 100]), "a token outside 0..99"),
        (answer([*CONTEXT, -1]), "a token outside 0..99"),
        (answer([*CONTEXT, 30], sequence_length=np.array([[6]], np.int32)), "sequence_length 6 is beyond"),
        (answer([*CONTEXT, 30], sequence_length=np.array([[5, 5]], np.int32)), "not one beam"),
        ({**answer([*CONTEXT, 30]), "output_ids": np.zeros((1, 2, 5), np.int32)}, "not one beam"),
        ({"output_ids": np.array([[[1]]], np.int32)}, "not one beam"),
    ],
)
def test_invalid_answer_is_refused(given, expected):
    with pytest.raises(EngineError, match=expected):
        read_acceptance(given, [21, 22], CONTEXT, BACKEND)


def test_answer_is_cut_at_its_length():
    padded = answer([*CONTEXT, 21, 30, 0, 0], sequence_length=np.array([[6]], np.int32))
    acceptance = read_acceptance(padded, [21, 22], CONTEXT, BACKEND)
    assert (acceptance.path, acceptance.next_token) == ((1,), 30)


def decoded(tensors, pick):
    """Answer as the backend is documented: its own tokens while they equal the drafts, at most request_output_len."""
    ids = tensors["input_ids"][0].tolist()
    drafts = tensors.get("draft_input_ids", np.empty((1, 0)))[0].tolist()
    for draft in [*drafts, None][: int(tensors["request_output_len"][0, 0])]:
        ids.append(pick(ids))
        if ids[-1] != draft:
            break
    return answer(ids)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_text_by_steps_is_the_stand_ins_own_text(prompt, drafts):
    def pick(ids):
        return (len(ids) * 7 + sum(ids)) % 3

    backend = Backend(vocab_size=3, max_seq_len=99, max_draft_len=6)
    own, text = list(prompt), list(prompt)
    while len(own) < len(prompt) + 12:
        own.append(pick(own))
    while len(text) < len(own):
        context, tree = np.array(text, np.int32), TokenTree.chain(drafts)
        tensors = step_tensors(step(drafts, context=context), context, backend)
        acceptance = read_acceptance(decoded(tensors, pick), drafts, context, backend)
        assert acceptance.path == tuple(range(1, len(acceptance.path) + 1))
        text += acceptance.tokens(tree)
    assert text[: len(own)] == own
