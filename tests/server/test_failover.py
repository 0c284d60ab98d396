"""Broken replicas that no reader notices, at CI size: a dozen streams, two replicas, each lost in a different way.

The full size: `python -m tests.failover`, 100 streams over three replicas.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from launcher import Server
from tests.failover import Readers, Result, fail_over, make_cases, replicas
from tests.support.clients import Stream, ask, until
from tests.support.gateway import running_gateway

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

NUM_READERS = 12
SEED = {"text_input": "abcabc", "seed": 5, "temperature": 0.9, "ignore_eos": True, "stream": True, "max_tokens": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failover")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Server]]:
    with replicas(folder, 2) as running:
        yield running


@pytest.fixture(scope="module")
def result(servers: list[Server], folder: Path) -> Result:
    urls = ",".join(server.grpc_url for server in servers)
    cases = make_cases(servers[0].grpc_url, 24, 300)
    with running_gateway(urls, folder / "target", silence_limit_s=3, health_interval_s=0.3) as gateway:
        found = fail_over(servers, gateway, Readers(gateway.url, cases, NUM_READERS), ["server", "model"])
    # The next tests use the replicas directly, and one of them may still be restarting.
    until(lambda: not any(server.why_not_ready() for server in servers), "replicas that serve again", 120)
    return found


def test_every_text_equals_the_undisturbed_one(result: Result) -> None:
    print(result.line())

    assert not result.faults, result.faults[:3]
    assert result.outcomes.keys() == {"equal"} and result.outcomes["equal"] >= NUM_READERS


def test_the_kills_met_streams_that_had_to_move(result: Result) -> None:
    assert len(result.num_met) == 2
    assert min(result.num_met) > 0  # the other readers were between two texts
    assert result.num_failovers >= 2


@pytest.mark.parametrize("num_generated", [1, 30, 59])
@pytest.mark.parametrize("method", ["none", "prompt_lookup", "suffix", "lookahead", "jacobi"])
def test_continued_text_is_the_rest_of_the_whole(
    servers: list[Server], folder: Path, method: str, num_generated: int
) -> None:
    whole = ask(servers[0].grpc_url, speculation=method, return_log_probs=True, **SEED)
    rest = ask(
        servers[1].grpc_url,
        speculation=method,
        return_log_probs=True,
        generated_ids=whole.ids[:num_generated],
        **SEED,
    )

    assert rest.ids == whole.ids[num_generated:]
    tokenizer = Tokenizer.from_file(str(folder / "target/tokenizer.json"))
    assert rest.text == tokenizer.decode(whole.ids[num_generated:])  # a token is a character here, or has no text
    assert _logprobs(rest) == _logprobs(whole)[num_generated:]


def test_generated_ids_that_end_the_output_are_refused(servers: list[Server]) -> None:
    answer = ask(servers[0].grpc_url, generated_ids=[5] * 60, **SEED)

    assert "generated_ids already end the output: length at token 60" in answer.error


def test_sequence_index_gives_the_sequences_of_a_request_for_several(servers: list[Server]) -> None:
    with Stream(servers[0].grpc_url) as stream:
        several = stream.ask(num_return_sequences=3, **SEED)
        alone = [stream.ask(sequence_index=index, **SEED) for index in range(3)]

    for index, answer in enumerate(alone):
        assert answer.ids == [
            i for part in several.parts if part["sequence_index"] == index for i in part["output_ids"]
        ]


def _logprobs(answer) -> list[float]:
    return [value for part in answer.parts for value in part["output_log_probs"]]
