"""Responses: streamed deltas, joined, are the whole response; the summary comes once, at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.core.drafting import Limits
from orchestrator.core.proposal import Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.drafting.registry import select_method
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import RequestInputs
from orchestrator.server.responses import Responses
from orchestrator.server.text import Chunk, FinishReason, StopRule

DEMO = Tokenizer.from_file(str(Path(__file__).resolve().parents[5] / "models/target/tokenizer.json"))
PROMPT = DEMO.encode("once upon").ids
DELTAS = {"text_output", "output_ids", "num_output_tokens", "step_lengths"}
LOGPROBS = {"output_log_probs", "cum_log_probs"}
SUMMARY = {
    "finish_reason", "rule", "num_input_tokens", "num_steps", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
}  # fmt: skip


def job_of(rule: StopRule, stream: bool, **options: Any) -> GenerationRequest:
    step_options = options.pop("options", StepOptions(logprobs=True))
    return GenerationRequest(
        inputs=RequestInputs(stream=stream, **options), prompt=PROMPT, prompt_text="once upon", sampling=Sampling(),
        stop=rule, num_sequences=1, plan=select_method("none", "", frozenset(), {}), prediction=(),
        limits=Limits(rule.max_tokens, 999, 9), options=step_options,
    )  # fmt: skip


def responses_of(
    job: GenerationRequest, steps: list[list[int]], late: bool = False, reason: FinishReason | None = None
) -> list[dict[str, Any]]:
    """Run the steps as the loop does; what is sent, as Python values."""
    sent: list[dict[str, np.ndarray]] = []
    sequence = job.sequence(0, DEMO)
    output, responses = sequence.output, Responses(job, sequence, sent.append)
    for step in steps:
        chunk = output.push(step, [-0.5 * (token % 3) for token in step])
        acceptance = Acceptance(tuple(range(1, len(step))), step[-1])
        sequence.statistics.observe(Proposal.chain(step, "test"), acceptance, len(chunk.ids), 0.001, 0.01)
        responses.emit(chunk)
        if output.finish:
            break
    else:
        if late:
            responses.finish(FinishReason.DEADLINE)
        elif reason:
            responses.emit(Chunk(output.close(reason), [], []))
    return [{name: value_of(tensor) for name, tensor in tensors.items()} for tensors in sent]


def value_of(tensor: np.ndarray) -> Any:
    """A tensor as Triton's batch-of-one models have it: (1, n); a text is (1,)."""
    assert tensor.shape[0] == 1
    values = tensor.reshape(tensor.shape[0], -1)[0].tolist() if tensor.ndim == 1 else tensor[0].tolist()
    return values[0].decode() if tensor.dtype == np.object_ else values


def joined(responses: list[dict[str, Any]]) -> dict[str, Any]:
    """Put deltas together as a client would."""
    whole = dict(responses[-1])
    whole["text_output"] = "".join(r["text_output"] for r in responses)
    for name in ("output_ids", "step_lengths"):
        whole[name] = [x for r in responses for x in r[name]]
    whole["num_output_tokens"] = [sum(r["num_output_tokens"][0] for r in responses)]
    if "output_log_probs" in whole:
        whole["output_log_probs"] = [[x for r in responses for x in r["output_log_probs"][0]]]
    return whole


steps = st.lists(
    st.lists(
        st.integers(0, DEMO.get_vocab_size() - 1) | st.sampled_from(DEMO.encode(" a漢b").ids), min_size=1, max_size=5
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(steps, st.integers(1, 25), st.sampled_from([(), ("a",), (" a漢",)]), st.booleans())
def test_responses_streamed_deltas_joined_are_the_whole_response(
    steps: list[list[int]], max_tokens: int, strings: tuple[str, ...], repeat_prompt: bool
) -> None:
    rule = StopRule(max_tokens, frozenset([0]), strings)
    end = FinishReason.CANCELLED
    streamed = responses_of(job_of(rule, True, exclude_input_in_output=not repeat_prompt), steps, reason=end)
    whole = responses_of(job_of(rule, False, exclude_input_in_output=not repeat_prompt), steps, reason=end)
    assert len(whole) == 1
    together = joined(streamed)
    assert together.pop("cum_log_probs") == pytest.approx(whole[0].pop("cum_log_probs"))
    assert together == whole[0]
    assert all(set(r) == DELTAS | LOGPROBS for r in streamed[:-1])
    assert set(streamed[-1]) == DELTAS | LOGPROBS | SUMMARY
    assert sum(together["step_lengths"]) == len(together["output_ids"]) == together["num_output_tokens"][0]
    assert all(length > 0 for length in together["step_lengths"])
    assert together["text_output"].startswith("once upon" if repeat_prompt else "")


def test_responses_summary_by_hand() -> None:
    (whole,) = responses_of(job_of(StopRule(5), False), [[5], [6, 7], [8, 9, 10]])
    assert whole["output_ids"] == [5, 6, 7, 8, 9] and whole["step_lengths"] == [1, 2, 2]
    assert whole["finish_reason"] == "length"
    assert whole["num_input_tokens"] == [len(PROMPT)] and whole["num_output_tokens"] == [5]
    assert whole["num_steps"] == [3]
    assert (whole["total_draft_tokens"], whole["total_accepted_draft_tokens"]) == ([6], [3])
    assert whole["acceptance_rate"] == [0.5]


def test_responses_stats_when_asked_are_json_on_the_last_response_alone() -> None:
    streamed = responses_of(job_of(StopRule(4), True, return_stats=True), [[5], [6, 7], [8]])
    assert [("stats" in r) for r in streamed] == [False, False, True]
    stats = json.loads(streamed[-1]["stats"])
    assert stats["method"] == "none" and stats["num_steps"] == 3
    assert stats["acceptance_length"] == pytest.approx(4 / 3)
    assert stats["accepted_per_step"] == pytest.approx(1 / 3)
    assert stats["draft_acceptance_rate"] == pytest.approx(1 / 4)
    assert 0 < stats["time_to_first_token_ms"] <= stats["total_ms"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given_steps", [[], [[5], [6]]])
def test_responses_deadline_sends_what_there_is(stream: bool, given_steps: list[list[int]]) -> None:
    sent = responses_of(job_of(StopRule(9), stream), given_steps, late=True)
    whole = joined(sent)
    assert whole["finish_reason"] == "deadline"
    assert whole["output_ids"] == [token for step in given_steps for token in step]
    assert sum("finish_reason" in r for r in sent) == 1


def test_responses_tensors_have_the_declared_types() -> None:
    sent: list[dict[str, np.ndarray]] = []
    job = job_of(StopRule(1), False, return_stats=True)
    sequence = job.sequence(0, DEMO)
    Responses(job, sequence, sent.append).emit(sequence.output.push([5], [-1.0]))
    config = (Path(__file__).resolve().parents[5] / "model_repository/speculative/config.pbtxt").read_text()
    outputs = config.split("output [", 1)[1]
    kinds = {"TYPE_STRING": np.object_, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32}
    for name, tensor in sent[0].items():
        declared = outputs.split(f'name: "{name}", data_type: ', 1)[1].split(",", 1)[0]
        assert tensor.dtype == kinds[declared], name
