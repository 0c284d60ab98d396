"""A text that another server began is continued where it was, and a sequence of several is asked for alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from launcher import Server
from tests.support.clients import Stream, ask

pytestmark = pytest.mark.server

SEED = {"text_input": "abcabc", "seed": 5, "temperature": 0.9, "ignore_eos": True, "stream": True, "max_tokens": 60}


@pytest.mark.parametrize("num_generated", [1, 59])
@pytest.mark.parametrize("method", ["none", "suffix", "lookahead"])
def test_continued_text_is_the_rest_of_the_whole(
    server: Server, checkpoints: Path, method: str, num_generated: int
) -> None:
    asked: dict[str, Any] = {"speculation": method, "return_log_probs": True, **SEED}
    whole = ask(server.grpc_url, **asked)
    rest = ask(server.grpc_url, generated_ids=whole.ids[:num_generated], cache_salt="another", **asked)

    assert rest.ids == whole.ids[num_generated:]
    tokenizer = Tokenizer.from_file(str(checkpoints / "target/tokenizer.json"))
    assert rest.text == tokenizer.decode(whole.ids[num_generated:])  # a token is a character here, or has no text
    assert _logprobs(rest) == _logprobs(whole)[num_generated:]


def test_generated_ids_that_end_the_output_are_refused(server: Server) -> None:
    answer = ask(server.grpc_url, generated_ids=[5] * 60, **SEED)

    assert "generated_ids already end the output: length at token 60" in answer.error


def test_sequence_index_gives_the_sequences_of_a_request_for_several(server: Server) -> None:
    with Stream(server.grpc_url) as stream:
        several = stream.ask(num_return_sequences=3, **SEED)
        alone = [stream.ask(sequence_index=index, **SEED) for index in range(3)]

    for index, answer in enumerate(alone):
        assert answer.ids == [
            i for part in several.parts if part["sequence_index"] == index for i in part["output_ids"]
        ]


def _logprobs(answer: Any) -> list[float]:
    return [value for part in answer.parts for value in part["output_log_probs"]]
