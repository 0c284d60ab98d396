"""A sequence and the replicas that fail under it: stand-ins that fail as Triton does (tests/support/standin_replica.py)."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine

import grpc
import pytest
from prometheus_client import Counter

from gateway import triton
from gateway.errors import ApiError, Busy, Failed, Unavailable
from gateway.generation import MAX_TRIES, Attempts, Generation, Refusal
from gateway.metrics import Metrics
from gateway.replicas import Replica, Replicas
from gateway.settings import Settings
from gateway.triton import FirstTokenTimeout, ReplicaDraining, ReplicaError, ReplicaFull
from tests.support.standin_replica import Fault, StandInReplica, text_of

pytestmark = pytest.mark.unit

SEED, LENGTH = 3, 12
FULL = Fault(
    0, grpc.StatusCode.UNAVAILABLE, "full: 32 requests run and 64 wait; try again later (max_running, max_waiting)"
)
OF_SALT = "full_for_salt: 32 requests run and 64 wait; try again in 3 s (max_running, max_waiting, max_running_per_salt in the deployment file)"


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "GRACE_S", 0.3)


def run(test: Callable[..., Coroutine], num_replicas: int = 2, **settings) -> None:
    """Run a coroutine over stand-ins and the gateway's view of them."""

    async def over_replicas() -> None:
        async with contextlib.AsyncExitStack() as stack:
            made = [await stack.enter_async_context(StandInReplica()) for _ in range(num_replicas)]
            given = {
                "silence_limit_s": 0.3,
                "first_limit_s": 0.5,
                "recovery_limit_s": 3,
                "health_interval_s": 0.05,
            } | settings
            replicas = Replicas(Settings(replicas=",".join(replica.address for replica in made), **given))
            watch = asyncio.create_task(replicas.watch())
            while not (replicas.all and all(replica.is_ready for replica in replicas.all.values())):
                await asyncio.sleep(0.01)
            try:
                await asyncio.wait_for(test(made, replicas), 30)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                await replicas.close()

    asyncio.run(over_replicas())


def generation(replicas: Replicas, metrics: Metrics | None = None, limit_s: float = 20, **inputs) -> Generation:
    given = {"text_input": "abc", "seed": SEED, "max_tokens": LENGTH} | inputs
    return Generation(given, replicas, replicas.settings, metrics or Metrics(), time.monotonic() + limit_s)


async def text(sequence: Generation) -> str:
    return "".join([delta.text async for delta in sequence.deltas()])


def break_both(made: list[StandInReplica], *faults: Fault | None) -> None:
    for replica in made:
        replica.faults = list(faults)


GONE = {
    "status": Fault(4),
    "internal": Fault(4, grpc.StatusCode.INTERNAL, "engine: it failed"),
    "end": Fault(4, None),
    "silence": Fault(4, is_silent=True),
    "stub": Fault(4, grpc.StatusCode.INVALID_ARGUMENT, "Stub process 'speculative' is not healthy"),
    "instance": Fault(
        4,
        grpc.StatusCode.INTERNAL,
        "Failed to process the request(s) for model instance 'speculative_0_0', message: Stub process "
        "'speculative_0_0' is not healthy.",
    ),
    "shutdown": Fault(4, grpc.StatusCode.UNAVAILABLE, "draining: the server is shutting down"),
}


@pytest.mark.parametrize("kind", GONE)
def test_text_goes_on_where_a_replica_stopped(kind: str) -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        break_both(made, GONE[kind])
        metrics = Metrics()
        assert await text(generation(replicas, metrics)) == text_of(SEED, LENGTH)
        begun = [len(request.get("generated_ids", [])) for replica in made for request in replica.requests]
        assert sorted(begun) == [0, 4, 8]  # both failed once after four tokens; then one had no fault left

    run(test)


def test_a_long_silence_leaves_time_for_another_replica() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = made[1].faults = [Fault(0, is_silent=True), Fault(3, is_silent=True)]
        assert await text(generation(replicas)) == text_of(SEED, LENGTH)

    run(test, recovery_limit_s=2, first_limit_s=2.5, silence_limit_s=2.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("top_p", "top_p must be in 0..1 (input top_p)"),
        *(
            ("unknown rule", f"unknown rule {quoted!r} (allowed: block, coupled, rejection, typical; input rule)")
            for quoted in ("Stub process", "', message: Stub process 'speculative' is not healthy.", "\nStub process")
        ),
    ],
)
def test_a_request_that_is_wrong_is_not_tried_again_whatever_it_quotes(words: str, message: str) -> None:
    """Otherwise a client could have every replica left alone, ever longer, by quoting what Triton says of a dead one."""

    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        break_both(made, Fault(0, grpc.StatusCode.INVALID_ARGUMENT, message))
        with pytest.raises(Refusal, match=words):
            await text(generation(replicas))
        assert sum(len(replica.requests) for replica in made) == 1
        assert all(replica.is_usable for replica in replicas.all.values())

    run(test)


@pytest.mark.parametrize(
    "message",
    [
        "busy: other guides take too long to compile; try again later (input guided_decoding_guide)",
        "busy: the request waited until its deadline",
        "busy: the server can start no further thread; try again in a second",
        "busy: a sequence did not end by the request's deadline",
        "busy: sequence 7 has a call under way",
    ],
)
def test_what_keeps_out_one_request_keeps_out_no_other(message: str) -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        break_both(made, Fault(0, grpc.StatusCode.UNAVAILABLE, message))
        with pytest.raises(Busy, match="all replicas are full"):
            await text(generation(replicas))
        replicas.check_room()
        assert all(replica.is_usable for replica in replicas.all.values())

    run(test)


def test_a_new_request_is_refused_when_all_are_full_and_served_when_one_is_not() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        break_both(made, FULL)
        with pytest.raises(Busy) as refused:
            await text(generation(replicas))
        assert refused.value.retry_after_s == 1 and [len(replica.requests) for replica in made] == [1, 1]

        made[0].faults = [FULL]
        for replica in replicas.all.values():
            replica.resting_until_s = 0.0
        assert await text(generation(replicas)) == text_of(SEED, LENGTH)

    run(test)


def counts(counter: Counter) -> dict[str, float]:
    """Return {reason: number} of the reasons that were counted."""
    samples = next(iter(counter.collect())).samples
    return {sample.labels["reason"]: sample.value for sample in samples if sample.value}


def test_overload_is_no_failover() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        metrics = Metrics()
        for _ in range(3):
            made[0].faults = [FULL]
            replicas.all[made[0].address].resting_until_s, replicas.all[made[0].address].is_full = 0.0, False
            with pytest.raises(Busy):
                await text(generation(replicas, metrics))
        assert (counts(metrics.failovers), counts(metrics.refusals)) == ({}, {"full": 3})

    run(test, num_replicas=1)


def test_a_text_that_moves_is_one_failover_however_often_it_is_refused_then() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        metrics = Metrics()
        made[0].faults = [GONE["internal"], FULL, FULL, DRAINING]
        assert await text(generation(replicas, metrics)) == text_of(SEED, LENGTH)
        assert counts(metrics.failovers) == {"failed": 1}
        assert counts(metrics.refusals) == {"full": 2, "draining": 1}

    run(test, num_replicas=1)


def test_a_refusal_passes_on_when_to_come_again() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [
            Fault(
                0,
                grpc.StatusCode.UNAVAILABLE,
                "full: 32 requests run and 64 wait; try again in 7 s (max_running, max_waiting)",
            )
        ]
        with pytest.raises(Busy) as refused:
            await text(generation(replicas))
        assert refused.value.headers() == {"Retry-After": "7"}
        with pytest.raises(Busy) as refused:
            await text(generation(replicas))
        assert refused.value.retry_after_s == 7 and len(made[0].requests) == 1, "it was not asked again"

    run(test, num_replicas=1)


def test_an_urgent_request_is_tried_on_full_replicas_and_a_flood_of_them_only_once() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        break_both(made, FULL)
        for _ in range(3):
            with pytest.raises(Busy):
                await text(generation(replicas))
        assert await text(generation(replicas, priority=-1)) == text_of(SEED, LENGTH), "it displaces another there"

        break_both(made, FULL, FULL, FULL)
        num_before = sum(len(replica.requests) for replica in made)
        for priority in (-4, -4, -3, 0, 9):
            with pytest.raises(Busy):
                await text(generation(replicas, priority=priority))
        assert sum(len(replica.requests) for replica in made) == num_before + 2, "one try on each"
        for priority in (-1_000_000, -10, -11):
            with pytest.raises(Busy):
                await text(generation(replicas, priority=priority))
        assert sum(len(replica.requests) for replica in made) == num_before + 4

    run(test)


def test_the_refusal_of_a_request_that_is_not_urgent_keeps_out_only_its_like() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        break_both(made, FULL)
        for _ in range(2):
            with pytest.raises(Busy):
                await text(generation(replicas, priority=5))
        assert await text(generation(replicas)) == text_of(SEED, LENGTH)

    run(test)


def test_a_text_that_has_begun_waits_for_a_full_replica() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [Fault(5), FULL, FULL]
        assert await text(generation(replicas)) == text_of(SEED, LENGTH)

    run(test, num_replicas=1)


def test_one_replica_that_comes_back_continues_its_own_text() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [Fault(5), Fault(3)]
        assert await text(generation(replicas)) == text_of(SEED, LENGTH)
        assert [len(request.get("generated_ids", [])) for request in made[0].requests] == [0, 5, 8]

    run(test, num_replicas=1)


def test_a_request_that_breaks_every_replica_is_given_up() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        break_both(made, *[Fault(0, grpc.StatusCode.INTERNAL, "boom")] * 9)
        with pytest.raises(Failed, match="boom"):
            await text(generation(replicas))
        assert [len(replica.requests) for replica in made] in ([2, 3], [3, 2])
        assert all(replica.is_usable for replica in replicas.all.values())  # the others' requests are served there

    run(test, recovery_limit_s=20)


def test_no_ready_replica_is_reported_within_the_limit() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        for replica in made:
            replica.is_up = False
        while any(replica.is_ready for replica in replicas.all.values()):
            await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="none is ready"):
            await text(generation(replicas))

    run(test, recovery_limit_s=0.3)


def test_the_deadline_travels_and_shrinks() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        break_both(made, GONE["silence"])
        await text(generation(replicas, limit_s=10))
        limits = [request["timeout_ms"][0] for replica in made for request in replica.requests]
        assert max(limits) <= 10_000 and max(limits) - min(limits) >= 500  # two silences of 0.3 s lie between

    run(test)


def test_leaving_a_stream_cancels_it() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [GONE["silence"]]
        sequence = generation(replicas)
        task = asyncio.create_task(text(sequence))
        while len(sequence.ids) < 4:  # from here on the replica is silent
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not made[0].num_cancelled:
            await asyncio.sleep(0.01)
        assert all(replica.num_running == 0 for replica in replicas.all.values())

    run(test, num_replicas=1, silence_limit_s=20)


DRAINING = Fault(
    0, message="draining: the server is draining: send the request to another replica, or again in a second"
)


def test_a_draining_replica_is_not_a_failure_of_the_request() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [DRAINING] * 3
        with pytest.raises(Unavailable, match="draining") as refused:
            await text(generation(replicas))
        assert refused.value.retry_after_s and len(made[0].requests) == 2  # the second after the pause

    run(test, num_replicas=1, recovery_limit_s=1)


def test_refusals_of_a_draining_or_full_replica_and_a_late_response_use_up_no_tries() -> None:
    refusals = [ReplicaDraining(DRAINING.message), ReplicaFull(FULL.message), FirstTokenTimeout("no response")]
    attempts = Attempts()
    for error in [*refusals * MAX_TRIES, ReplicaError("boom"), *refusals]:
        attempts = attempts.with_failure(Replica("a:1", None), error)
    assert attempts.num_failed == 1


def test_a_text_that_has_begun_ends_with_its_deadline_though_the_replica_is_silent() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [GONE["silence"]]
        deltas = [delta async for delta in generation(replicas, limit_s=0.5, input_ids=[1, 2, 3]).deltas()]
        assert "".join(delta.text for delta in deltas) == text_of(SEED, 4)
        assert (deltas[-1].finish_reason, deltas[-1].num_input_tokens) == ("deadline", 3)

    run(test, num_replicas=1, silence_limit_s=20)


def test_a_text_that_finds_no_replica_before_its_deadline_ends_with_it() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [GONE["status"]]
        made[0].on_request = lambda: setattr(made[0], "is_up", False)
        deltas = [delta async for delta in generation(replicas, limit_s=0.5).deltas()]
        assert "".join(delta.text for delta in deltas) == text_of(SEED, 4) and deltas[-1].finish_reason == "deadline"

    run(test, num_replicas=1)


def test_a_request_without_a_token_at_its_deadline_is_refused() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        made[0].faults = [Fault(0, is_silent=True)]
        with pytest.raises(Unavailable, match="deadline"):
            await text(generation(replicas, limit_s=0.3))

    run(test, num_replicas=1, first_limit_s=20)


def test_errors_are_of_the_api() -> None:
    assert all(issubclass(kind, ApiError) for kind in (Busy, Failed, Refusal, Unavailable))


def test_a_text_that_has_begun_waits_for_room_of_its_tenant() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        full = [Fault(0, grpc.StatusCode.UNAVAILABLE, OF_SALT)] * 3
        made[0].faults = [GONE["internal"], *full]
        began_s = time.monotonic()
        assert await text(generation(replicas, cache_salt="many")) == text_of(SEED, LENGTH)
        assert len(made[0].requests) == 5 and time.monotonic() - began_s > 1.4

    run(test, num_replicas=1)


def test_a_tenant_that_fills_the_queue_keeps_out_no_other_tenant() -> None:
    """The server takes the others' requests in place of its own; the gateway must not refuse them by itself."""

    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        flood = [Fault(0, grpc.StatusCode.UNAVAILABLE, OF_SALT)] * 3
        break_both(made, *flood)
        for _ in flood:
            with pytest.raises(Busy) as refused:
                await text(generation(replicas, cache_salt="many"))
            assert refused.value.retry_after_s == 3
        replicas.check_room()
        assert await text(generation(replicas, cache_salt="few")) == text_of(SEED, LENGTH)

    run(test)
