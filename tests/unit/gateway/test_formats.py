"""The figures of speculation and the usage, by hand; tokens that are parts of characters."""

from pathlib import Path

import pytest

from gateway.formats import ChatFormat, Format, speculation_metrics, usage
from gateway.generation import Delta, to_delta
from gateway.tokenizer import read_checkpoint
from tests.unit.gateway.test_tokenizer import write

pytestmark = pytest.mark.unit


def test_figures_by_hand() -> None:
    # Three steps of one sequence accepted 2, 0 and 2 of 4, 4 and 5 draft tokens; one of another 1 of 3.
    first = Delta(ids=list(range(7)), drafted=[4, 4, 5], accepted=[2, 0, 2], num_input_tokens=9)
    second = Delta(ids=[1, 2], drafted=[3], accepted=[1], num_input_tokens=9)

    assert speculation_metrics([first, second]) == {
        "mean_acceptance_length": 1 + 5 / 4,
        "draft_acceptance_rate": 5 / 16,
        "acceptance_histogram": [1, 1, 2],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 16,
    }
    assert usage([first, second], n=2)["prompt_tokens"] == 9 and usage([first, second], n=1)["prompt_tokens"] == 18
    details = usage([first, second], 2, [first, second])["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 11}


def test_figures_of_nothing() -> None:
    assert speculation_metrics([Delta()])["mean_acceptance_length"] == 1
    assert speculation_metrics([Delta()])["acceptance_histogram"] == [0]


def test_deltas_add_up_and_the_last_one_ends() -> None:
    whole = Delta()
    table = {"top_ids": [1, 2, 3, 4], "top_log_probs": [-1.0, -2.0, -3.0, -4.0], "output_log_probs": [-1.0, -3.0]}
    whole.add(to_delta({"text_output": "ab", "output_ids": [1, 3], "step_lengths": [2], **table}))
    end = {"finish_reason": "stop", "num_input_tokens": 5, "stats": '{"num_cached_tokens": 4}'}
    whole.add(to_delta({"text_output": "", "output_ids": [], "step_lengths": [], **end}))

    assert (whole.text, whole.ids, whole.top_ids) == ("ab", [1, 3], [[1, 2], [3, 4]])
    assert (whole.finish_reason, whole.num_input_tokens, whole.num_cached_tokens) == ("stop", 5, 4)


def test_parts_of_a_character_show_their_bytes(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(write(tmp_path)), "", "")
    ids = checkpoint.encode("é!")
    delta = Delta("é!", ids, [-1.0] * 3, [[token] for token in ids], [[-1.0]] * 3)

    assert Format(checkpoint, 0, num_top=1).logprobs(0, delta)["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    content = ChatFormat(checkpoint, 0, num_top=1).logprobs(0, delta)["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert content[2]["top_logprobs"] == [{"token": "!", "logprob": -1.0, "bytes": [0x21]}]


def test_offsets_count_characters_of_several_tokens_once_also_across_chunks(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(write(tmp_path)), "", "")
    ids = checkpoint.encode("é漢!a")  # 2, 3, 1 and 1 bytes, a token each
    form = Format(checkpoint, 0, num_top=0)
    offsets = [form.logprobs(0, Delta("", part, [-1.0] * len(part)))["text_offset"] for part in (ids[:3], ids[3:])]

    assert offsets == [[0, 0, 1], [1, 1, 2, 3]]
    assert form.logprobs(1, Delta("", ids[:1], [-1.0]))["text_offset"] == [0], "each choice counts its own"


def test_a_text_that_its_deadline_ended_says_so(tmp_path: Path) -> None:
    choice = Format(read_checkpoint(str(write(tmp_path)), "", ""), 0).choice(
        0, Delta("x", [1], finish_reason="deadline")
    )

    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
