"""The choices of one request of which replicas refuse some as full: each waits for room once one of them has begun."""

import asyncio
import dataclasses
import functools
import logging

import pytest

from gateway.errors import Busy
from gateway.generation import Generation, Progress
from gateway.jobs import _merged
from gateway.replicas import Replicas
from tests.support.standin_replica import Fault, StandInReplica, text_of
from tests.unit.gateway.test_generation import FULL, LENGTH, OF_SALT, SEED, generation, run

pytestmark = pytest.mark.unit


def choices(replicas: Replicas, n: int = 2, limit_s: float = 20) -> list[Generation]:
    """Return the sequences of a request for n choices, each with a seed of its own, which its text shows."""
    progress = Progress()
    made = [generation(replicas, limit_s=limit_s, seed=SEED + i, sequence_index=i) for i in range(n)]
    return [dataclasses.replace(one, progress=progress) for one in made]


def refuse(made: list[StandInReplica], index: int, *faults: Fault) -> None:
    """Have replicas serve choice `index` with these faults, one for each time that it is sent, and the others well."""
    planned = list(faults)

    def plan(replica: StandInReplica) -> None:
        is_this = replica.requests[-1]["sequence_index"] == [index]
        replica.faults = [planned.pop(0)] if is_this and planned else []

    for replica in made:
        replica.on_request = functools.partial(plan, replica)


async def texts(sequences: list[Generation], begun: asyncio.Event) -> list[str]:
    """Return the text of each sequence; `begun` is set at the first delta."""
    found = [""] * len(sequences)
    async for index, delta in _merged(sequences):
        begun.set()
        found[index] += delta.text
    return found


def sent(replica: StandInReplica, index: int) -> int:
    """Return how often a replica was sent a choice."""
    return sum(request["sequence_index"] == [index] for request in replica.requests)


@pytest.mark.parametrize("message", [FULL.message, OF_SALT, "busy: the request waited until its deadline"])
def test_a_choice_that_is_refused_after_another_has_begun_waits_for_room(message: str) -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        begun = asyncio.Event()
        full = dataclasses.replace(FULL, message=message)
        refuse(made, 1, dataclasses.replace(full, not_before=begun), full, full)
        assert await texts(choices(replicas, 3), begun) == [text_of(SEED + i, LENGTH) for i in range(3)]
        assert [sent(made[0], i) for i in range(3)] == [1, 4, 1]

    run(test, num_replicas=1, first_limit_s=10, recovery_limit_s=0.3)  # the limit is for replicas that are gone


def test_a_choice_that_waits_for_room_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        begun = asyncio.Event()
        refuse(made, 1, dataclasses.replace(FULL, not_before=begun), FULL, FULL, Fault(0, message="stub is unhealthy"))
        assert await texts(choices(replicas), begun) == [text_of(SEED + i, LENGTH) for i in range(2)]
        assert sent(made[0], 1) == 5

    run(test, num_replicas=1, first_limit_s=10)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["32 requests run" in line for line in said] == [True, False], said


def test_a_choice_that_is_refused_goes_to_a_replica_with_room() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        begun = asyncio.Event()
        refuse(made, 1, dataclasses.replace(FULL, not_before=begun))
        assert await texts(choices(replicas), begun) == [text_of(SEED, LENGTH), text_of(SEED + 1, LENGTH)]
        assert [sent(replica, 1) for replica in made] == [1, 1]

    run(test, first_limit_s=10)


def test_a_request_of_which_a_choice_is_refused_before_any_has_begun_is_refused() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        never = asyncio.Event()

        def plan() -> None:
            is_second = made[0].requests[-1]["sequence_index"] == [1]
            made[0].faults = [dataclasses.replace(FULL, message=OF_SALT) if is_second else Fault(0, not_before=never)]

        made[0].on_request = plan
        with pytest.raises(Busy, match="all replicas are full: 32 requests run") as refused:
            await texts(choices(replicas), never)
        assert refused.value.retry_after_s == 3 and sent(made[0], 1) == 1
        while not made[0].num_cancelled:  # the other choice
            await asyncio.sleep(0.01)
        assert all(replica.num_running == 0 for replica in replicas.all.values())

    run(test, num_replicas=1, first_limit_s=10)


def test_a_choice_that_never_gets_room_fails_its_request_at_the_deadline() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        begun = asyncio.Event()
        refuse(made, 1, dataclasses.replace(FULL, not_before=begun), *[FULL] * 50)
        received = ""
        with pytest.raises(Busy, match="no replica had room in time: 32 requests run"):
            async for index, delta in _merged(choices(replicas, limit_s=1.5)):
                begun.set()
                received += delta.text if index == 0 else "wrong"
        assert received == text_of(SEED, LENGTH), "the other choice was not cut short"
        assert sent(made[0], 1) >= 2

    run(test, num_replicas=1, first_limit_s=10)


def test_a_client_that_leaves_ends_the_choices_that_run_and_those_that_wait_for_room() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        begun = asyncio.Event()
        made[0].pace_s = 0.2
        refuse(made, 1, dataclasses.replace(FULL, not_before=begun), *[FULL] * 50)
        sequences = choices(replicas)
        reading = asyncio.create_task(texts(sequences, begun))
        while sent(made[0], 1) < 2:
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        while not made[0].num_cancelled:
            await asyncio.sleep(0.01)
        assert all(replica.num_running == 0 for replica in replicas.all.values())
        num_sent = sent(made[0], 1)
        await asyncio.sleep(1.2)  # over two pauses of a full replica
        assert sent(made[0], 1) == num_sent

    run(test, num_replicas=1, first_limit_s=10, silence_limit_s=10)
