"""The choices of one request to the gateway, of which a real server displaces one from its queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from launcher import Server
from tests.server.conftest import deployment, link, serving
from tests.support.clients import Stream, ask, metric, until
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.server

#: With a penalty each step is decided in Python, which gives the text of the first choice some time.
SAMPLING = {"temperature": 1.0, "seed": 4, "presence_penalty": 0.1, "ignore_eos": True, "speculation": "none"}
BODY = {"model": "target", "prompt": "abcabcabc", "max_tokens": 450, "n": 2, **SAMPLING}
INPUTS = {"text_input": "abcabcabc", "max_tokens": 450, "stream": True, **SAMPLING}


@pytest.fixture(scope="module")
def small(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = link(checkpoints, tmp_path_factory.mktemp("choices"))
    with serving(deployment(folder, "max_running = 1", "max_waiting = 1")) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(small: Server, checkpoints: Path) -> Iterator[RunningGateway]:
    with running_gateway(small.grpc_url, checkpoints / "target") as running:
        yield running


def num_running(server: Server) -> float:
    return metric(server.metrics_url, "spec_num_requests_running", model="speculative")


def test_a_choice_that_loses_its_place_while_another_streams_is_served_later(
    small: Server, gateway: RunningGateway
) -> None:
    texts = ["", ""]
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        for number, event in enumerate(events):
            assert "error" not in event, event
            choice = event["choices"][0]
            texts[choice["index"]] += choice["text"]
            if number == 0:
                urgent = ask(small.grpc_url, **{**INPUTS, "max_tokens": 2, "priority": -5})
                assert not urgent.error, "it takes the place of the choice that waits"
    assert gateway.metric('spec_gateway_refusals_total{reason="full"}') >= 1, "the choice was refused, and tried again"
    alone = [ask(small.grpc_url, **INPUTS, **more).text for more in ({}, {"sequence_index": 1})]
    assert texts == alone


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_whose_choices_do_not_fit_is_refused_at_once(
    small: Server, gateway: RunningGateway, streams: bool
) -> None:
    with Stream(small.grpc_url) as other:
        other.send("runs", **INPUTS)
        assert other.receive().values
        answer = gateway.post("/v1/completions", BODY | {"stream": streams})
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1, answer.text
        assert answer.json()["error"]["message"].startswith("all replicas are full: 1 requests run and 1 wait")
    until(lambda: num_running(small) == 0, "the end of all")
    answer = gateway.post("/v1/completions", BODY | {"max_tokens": 2, "n": 1})
    assert answer.status_code == 200, "the choice that waited has left the queue"
