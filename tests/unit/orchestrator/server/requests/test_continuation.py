"""Texts that another server began, and the seeds of their sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from orchestrator.core.errors import RequestError
from orchestrator.server.request_builder import RequestBuilder
from tests.support.request_building import EOS, built, refusal

DEMO = Tokenizer.from_file("models/target/tokenizer.json")
BEGUN = "one 漢字 two, then 🙂 three ends here"


@pytest.mark.parametrize("stops", [(), ("two, th",), ("🙂 t",), ("ends!", "here!")])
def test_a_text_continued_after_any_token_gets_the_rest_of_its_text(
    builder: RequestBuilder, stops: tuple[str, ...]
) -> None:
    """Whichever tokens came before: characters in the middle and stop strings that have begun are completed."""
    ids = DEMO.encode(BEGUN).ids

    def parts(generated: list[int]) -> tuple[list[str], str | None]:
        job = built(builder)
        job = replace(job, inputs=job.inputs.model_copy(update={"generated_ids": tuple(generated)}), prompt=[5])
        job = replace(job, stop=replace(job.stop, max_tokens=len(ids), ids=frozenset(), strings=stops))
        output = job.sequence(0, DEMO).output
        return [output.push([token]).text for token in ids[len(generated) :] if not output.finish], output.finish

    whole, finish = parts([])
    for num_generated in range(1, len(whole)):
        assert parts(ids[:num_generated]) == (whole[num_generated:], finish)


def test_a_continued_text_counts_as_output(builder: RequestBuilder) -> None:
    job = built(builder, generated_ids=[7, 8], max_tokens=5)
    sequence = job.sequence(0, builder.checkpoint.tokenizer)

    assert sequence.context.ids == [1, 2, 3, 7, 8] and sequence.context.prompt_len == 3
    assert sequence.output.num_tokens == 2 and sequence.limits.budget(sequence.context).max_depth == 2


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"generated_ids": [99]}, "generated_ids must have ids in 0..63"),
        ({"generated_ids": [5], "num_return_sequences": 2}, "generated_ids continue one sequence"),
        ({"generated_ids": [5], "exclude_input_in_output": False}, "generated_ids continue one sequence"),
        ({"sequence_index": -1}, "sequence_index"),
        ({"stream_steps": True}, "stream_steps needs stream"),
        ({"stream": True, "stream_steps": True, "return_steps": True}, "stream_steps and return_steps exclude"),
    ],
)
def test_what_cannot_be_continued_is_refused(builder: RequestBuilder, inputs: dict[str, Any], words: str) -> None:
    assert words in refusal(builder, **inputs)


@pytest.mark.parametrize(
    ("generated", "why"), [([5, EOS, 6], "stop at token 2 of 3"), ([5] * 8, "length at token 8 of 8")]
)
def test_output_that_has_ended_is_not_continued(builder: RequestBuilder, generated: list[int], why: str) -> None:
    with pytest.raises(RequestError, match=f"already end the output: {why}"):
        built(builder, generated_ids=generated).sequence(0, builder.checkpoint.tokenizer)
