"""Several sequences of one request: one response with all of them, or each streamed under its number."""

from __future__ import annotations

import threading

import numpy as np

from orchestrator.core.arrays import Tensors
from orchestrator.server.responses import ResponseMerger


def said(number: int, num_tokens: int) -> Tensors:
    return {
        "text_output": np.array([[f"text {number}".encode()]], np.object_),
        "output_ids": np.full((1, num_tokens), number, np.int32),
        "num_output_tokens": np.array([[num_tokens]], np.int32),
        "output_log_probs": np.full((1, 1, num_tokens), -float(number + 1), np.float32),
        "top_ids": np.full((1, num_tokens, 2), number, np.int32),
        "num_input_tokens": np.array([[9]], np.int32),
        "rule": np.array([[b"coupled"]], np.object_),
    }


def test_all_are_sent_in_one_response_in_order_whoever_ends_first() -> None:
    sent: list[Tensors] = []
    together = ResponseMerger(3, False, sent.append)
    for index in (2, 0, 1):
        assert not sent
        together.sender(index)(said(index, index + 1))
    (whole,) = sent
    assert whole["text_output"].tolist() == [[b"text 0", b"text 1", b"text 2"]]
    assert whole["output_ids"].tolist() == [[0, 1, 1, 2, 2, 2]]
    assert whole["num_output_tokens"].tolist() == [[1, 2, 3]]
    assert whole["output_log_probs"].tolist() == [[[-1, 0, 0], [-2, -2, 0], [-3, -3, -3]]]
    assert whole["top_ids"].shape == (1, 6, 2)
    assert whole["num_input_tokens"].tolist() == [[9]] and whole["rule"].tolist() == [[b"coupled"]]


def test_streamed_each_response_names_its_sequence_at_once() -> None:
    sent: list[Tensors] = []
    together = ResponseMerger(2, True, sent.append)
    for index in (1, 0, 1):
        together.sender(index)(said(index, 2))
        assert sent[-1]["sequence_index"].tolist() == [[index]]
    assert len(sent) == 3


def test_threads_do_not_lose_one_another_s_part() -> None:
    sent: list[Tensors] = []
    together = ResponseMerger(16, False, sent.append)
    threads = [threading.Thread(target=lambda i=i: together.sender(i)(said(i, 1))) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == 1 and sent[0]["output_ids"].tolist() == [list(range(16))]
