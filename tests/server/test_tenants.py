"""A salt's limit of tokens holds in both public models together, and other salts do not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import Server
from tests.server.conftest import deployment, link, serving
from tests.support.clients import Stream, ask, metric, until

pytestmark = pytest.mark.server

#: A text that takes a while: with a penalty each step is decided in Python.
LONG = {"text_input": "abcabcabc", "max_tokens": 450, "ignore_eos": True, "presence_penalty": 0.1, "stream": True}
SHORT = {"input_ids": [5, 6, 7], "max_tokens": 47, "ignore_eos": True}


@pytest.fixture(scope="module")
def frugal(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = link(checkpoints, tmp_path_factory.mktemp("tenants"))
    limits = ("max_running = 4", "max_running_tokens_per_salt = 500", 'default_speculation = "none"')
    with serving(deployment(folder, *limits)) as server:
        yield server


def num_waiting(server: Server, model: str) -> float:
    return metric(server.metrics_url, "spec_num_requests_waiting", model=model)


def test_a_request_beyond_the_tokens_of_its_salt_waits_and_those_of_others_do_not(frugal: Server) -> None:
    expected = ask(frugal.grpc_url, **SHORT, seed=1).ids
    with Stream(frugal.grpc_url) as stream:
        stream.send("long", **LONG, cache_salt="a")
        begun = stream.receive().values
        assert begun
        stream.send("late", model="speculative_unary", **SHORT, seed=1, num_return_sequences=2, cache_salt="a")
        until(lambda: num_waiting(frugal, "speculative_unary") == 1, "the request that waits")
        assert ask(frugal.grpc_url, **SHORT, seed=1, cache_salt="b").ids == expected
        assert num_waiting(frugal, "speculative_unary") == 1
        stream.send("fits not", **SHORT, cache_salt="a", seed=1)  # 450 + 3 and 50 more than 500
        answers = stream.answers("long", "late", "fits not")
    assert len(begun["output_ids"]) + len(answers["long"].ids) == 450
    assert answers["late"].last["output_ids"][:47] == expected
    assert answers["fits not"].ids == expected
