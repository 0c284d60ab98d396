"""Broken replicas that no reader notices, at CI size: a dozen streams, two replicas, each lost in a different way.

The full size: `python -m tests.failover`, 100 streams over three replicas.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import Server
from tests.failover import Readers, Result, fail_over, make_cases, replicas
from tests.support.gateway import running_gateway

pytestmark = [pytest.mark.server, pytest.mark.long]

NUM_READERS = 12


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
        return fail_over(servers, gateway, Readers(gateway.url, cases, NUM_READERS), ["server", "model"])


def test_every_text_equals_the_undisturbed_one(result: Result) -> None:
    print(result.line())

    assert not result.faults, result.faults[:3]
    assert result.outcomes.keys() == {"equal"} and result.outcomes["equal"] >= NUM_READERS


def test_the_kills_met_streams_that_had_to_move(result: Result) -> None:
    assert len(result.num_met) == 2
    assert min(result.num_met) > 0  # the other readers were between two texts
    assert result.num_failovers >= 2
