"""The gateway's view of its replicas: one outage is one failure, however many streams report it; names come and go."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator

import pytest

from gateway.metrics import Metrics
from gateway.replicas import InFlight, Replicas
from gateway.settings import Settings, SettingsError
from gateway.triton import FirstTokenTimeout
from tests.support.standin_replica import Fault, StandInReplica, text_of
from tests.unit.gateway.test_generation import LENGTH, SEED, generation, run, text

pytestmark = pytest.mark.unit


def test_sixteen_streams_survive_the_end_of_the_only_replica() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        (replica,) = replicas.all.values()
        made[0].faults = [Fault(5) for _ in range(16)]
        comes_back = asyncio.get_running_loop().call_later(1, lambda: setattr(made[0], "is_up", True))
        made[0].on_request = lambda: setattr(made[0], "is_up", len(made[0].requests) > 16)  # down from the first on
        texts = await asyncio.gather(*(text(generation(replicas)) for _ in range(16)))
        comes_back.cancel()
        assert texts == [text_of(SEED, LENGTH)] * 16
        assert sorted(len(request.get("generated_ids", [])) for request in made[0].requests) == [0] * 16 + [5] * 16
        assert replica.num_failures == 0

    run(test, num_replicas=1, recovery_limit_s=8)


def test_an_outage_counts_once_and_the_next_one_doubles_the_pause() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        (replica,) = replicas.all.values()
        pauses = []
        for _ in range(3):
            began_s = time.monotonic()
            for _ in range(16):
                replica.eject(began_s)
            pauses.append(replica.resting_until_s - replica.ejected_s)
            await asyncio.sleep(0.02)
        assert pauses == [0.5, 1, 2] and not replica.is_usable
        replicas.report(replica, None, time.monotonic())
        assert replica.num_failures == 0

    run(test, num_replicas=1)


def test_a_replica_that_rests_is_still_checked() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        (replica,) = replicas.all.values()
        replica.eject(time.monotonic())
        replica.resting_until_s = time.monotonic() + 3600
        await replica.check()
        assert replica.is_ready and not replica.is_usable
        made[0].is_up = False
        await replica.check()
        assert not replica.is_ready

    run(test, num_replicas=1, health_interval_s=60)


async def two_streams(made: list[StandInReplica], replicas: Replicas, silence: Fault) -> list[str]:
    """Return the texts of a long stream, and of one that falls silent beside it once both have begun."""
    made[0].pace_s = 0.05
    made[0].faults = [None, silence]
    long = asyncio.create_task(text(generation(replicas, max_tokens=40)))
    while not any(request.first_response_s < math.inf for request in in_flight(replicas)):
        await asyncio.sleep(0.01)
    return await asyncio.gather(long, text(generation(replicas)))


def in_flight(replicas: Replicas) -> list[InFlight]:
    return [request for replica in replicas.all.values() for request in replica.in_flight]


def test_a_preempted_stream_waits_while_older_ones_are_answered() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        (replica,) = replicas.all.values()
        texts = await two_streams(made, replicas, Fault(4, pause_s=1.0))
        assert texts == [text_of(SEED, 40), text_of(SEED, LENGTH)]
        assert len(made[0].requests) == 2, "none was sent again"
        assert replica.num_failures == 0 and replica.ejected_s == -math.inf

    run(test, num_replicas=1)


def test_a_stream_of_a_dead_process_is_moved_though_the_new_process_answers() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        (replica,) = replicas.all.values()
        made[0].faults = [Fault(4, is_silent=True)]
        dead = generation(replicas)
        first = asyncio.create_task(text(dead))
        while len(dead.ids) < 4:
            await asyncio.sleep(0.01)
        made[0].pace_s = 0.05
        later = asyncio.create_task(text(generation(replicas, max_tokens=40)))
        assert await first == text_of(SEED, LENGTH) and not later.done()
        assert replica.ejected_s == -math.inf, "it serves others"
        assert await later == text_of(SEED, 40)

    run(test, num_replicas=1)


def test_a_late_first_response_moves_the_request_once_and_ejects_nobody() -> None:
    """On the second replica it waits: it would go from one queue's end to the other's forever."""

    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = made[1].faults = [Fault(0, is_silent=True), Fault(0, pause_s=1.5)]
        metrics = Metrics()
        assert await text(generation(replicas, metrics)) == text_of(SEED, LENGTH)
        assert [len(replica.requests) for replica in made] == [1, 1]
        assert metrics.refusals.labels(reason="late")._value.get() == 1
        assert all(replica.ejected_s == -math.inf for replica in replicas.all.values())

    run(test)


def test_a_request_in_the_queue_of_the_only_replica_keeps_its_place() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [Fault(0, pause_s=1.5)]
        assert await text(generation(replicas)) == text_of(SEED, LENGTH)
        assert len(made[0].requests) == 1

    run(test, num_replicas=1, first_limit_s=0.2)


def test_a_request_that_an_outage_lost_before_its_first_response_is_sent_again() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        (replica,) = replicas.all.values()
        made[0].faults = [Fault(0, is_silent=True)]
        lost = asyncio.create_task(text(generation(replicas)))
        while not made[0].requests:
            await asyncio.sleep(0.01)
        made[0].is_up = False
        while replica.is_ready:
            await asyncio.sleep(0.01)
        made[0].is_up = True
        assert await lost == text_of(SEED, LENGTH) and len(made[0].requests) == 2

    run(test, num_replicas=1)


@contextlib.asynccontextmanager
async def wire_to(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield an address that forwards to another while the event is set: else it carries nothing, as a cut cable does."""
    is_whole = asyncio.Event()
    is_whole.set()
    host, port = address.split(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(4096):
                await is_whole.wait()
                writer.write(data)
                await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer), return_exceptions=True)

    wire = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{wire.sockets[0].getsockname()[1]}", is_whole
    finally:
        is_whole.set()
        wire.close()


def test_a_machine_that_vanishes_while_a_long_request_is_sent_is_given_up() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        async with wire_to(made[0].address) as (address, is_whole):
            await replicas._update([address])
            (replica,) = replicas.all.values()
            await replica.check()
            is_whole.clear()
            # Longer than the window of HTTP/2, which only the other side can open again.
            with pytest.raises(FirstTokenTimeout):
                async for _ in replica.client.stream({"text_input": "x" * (8 << 20), "timeout_ms": 10_000}, 0.3, 0.3):
                    pass

    run(test, num_replicas=1, health_interval_s=60)


def test_an_address_that_leaves_is_no_longer_used() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        await replicas._update([made[1].address])
        assert list(replicas.all) == [made[1].address]
        assert await text(generation(replicas)) == text_of(SEED, LENGTH)
        assert not made[0].requests

    run(test)


def test_a_name_is_resolved_again_and_its_addresses_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: list[StandInReplica], _: Replicas) -> None:
        host, port = made[0].address.split(":")
        found = [(None, None, None, "", (host, int(port)))]

        async def getaddrinfo(name: str, number: int, **options):
            if not found:
                raise OSError("no such name")
            assert (name, number) == ("replicas.example", int(port))
            return found

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        replicas = Replicas(Settings(replicas=f"dns://replicas.example:{port}"))
        await replicas._update(await replicas._resolve())
        assert list(replicas.all) == [made[0].address]
        found[:] = [(None, None, None, "", ("10.0.0.9", int(port))), (None, None, None, "", ("::1", int(port), 0, 0))]
        await replicas._update(await replicas._resolve())
        assert sorted(replicas.all) == [f"10.0.0.9:{port}", f"[::1]:{port}"]
        found.clear()  # a name server that fails changes nothing
        assert sorted(await replicas._resolve()) == sorted(replicas.all)
        await replicas.close()

    run(test, num_replicas=1)


def test_watching_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        (replica,) = replicas.all.values()
        asked = 0

        async def is_ready(*_: object) -> bool:
            nonlocal asked
            asked += 1
            if asked < 3:
                raise UnicodeError("label too long")
            return False

        monkeypatch.setattr(replica.client, "is_ready", is_ready)
        while replica.is_ready:
            await asyncio.sleep(0.01)

    run(test, num_replicas=1)


def test_a_name_that_cannot_be_one_is_an_error_of_the_start() -> None:
    with pytest.raises(SettingsError, match="label"):
        Replicas(Settings(replicas=f"dns://{'x' * 64}.example:8001"))
