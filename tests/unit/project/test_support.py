"""What the tests of servers rely on: the metric that is asked for, and the end of a stand-in's stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.triton import MODEL
from tests.support.clients import infer_request, series_in
from tests.support.standin_replica import StandInReplica

METRICS = """\
# TYPE spec_sequences gauge
spec_sequences{previous_model="target",model="draft",version="1"} 1
spec_sequences{model="target2",version="1"} 2
spec_sequences{version="1",model="target"} 3
spec_sequences_total{model="target",state="a,\\"b\\""} 4
"""


def test_a_metric_is_the_one_whose_labels_are_the_ones_asked_for() -> None:
    assert series_in(METRICS, "spec_sequences", model="target") == 3
    assert series_in(METRICS, "spec_sequences", model="target2") == 2
    assert series_in(METRICS, "spec_sequences_total", state='a,\\"b\\"') == 4
    with pytest.raises(AssertionError, match="no series"):
        series_in(METRICS, "spec_sequences", model="tar")


async def _asked() -> AsyncIterator[Any]:
    yield infer_request(MODEL, seed=1, max_tokens=[9])


def test_a_replica_counts_a_stream_that_is_closed_while_it_sends() -> None:
    async def closed(replica: StandInReplica) -> None:
        stream: Any = replica.ModelStreamInfer(_asked(), None)
        await anext(stream)
        assert replica.num_cancelled == 0
        await stream.aclose()

    replica = StandInReplica()
    asyncio.run(closed(replica))
    assert replica.num_cancelled == 1
