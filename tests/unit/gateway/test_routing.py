"""Routing: one prompt, one replica; unless that one has much more to do."""

from collections import Counter
from dataclasses import dataclass

import pytest

from gateway.replicas import Replicas
from gateway.routing import affinity_key, choose
from tests.support.standin_replica import StandInReplica
from tests.unit.gateway.test_generation import generation, run, text

pytestmark = pytest.mark.unit


@dataclass
class Stub:
    address: str
    num_running: int = 0


KEYS = [affinity_key({"text_input": f"prompt {number}"}) for number in range(300)]


def made(number: int) -> list[Stub]:
    return [Stub(f"10.0.0.{index}:8001") for index in range(number)]


def test_one_prompt_has_one_replica_and_prompts_spread() -> None:
    stubs = made(3)
    found = [choose(stubs, key, 4).address for key in KEYS]

    assert found == [choose(stubs[::-1], key, 4).address for key in KEYS]
    assert min(Counter(found).values()) > 60 and len(Counter(found)) == 3


def test_a_replica_that_leaves_moves_only_its_own_prompts() -> None:
    stubs = made(4)
    before = [choose(stubs, key, 4).address for key in KEYS]
    after = [choose(stubs[1:], key, 4).address for key in KEYS]

    assert all(old == new for old, new in zip(before, after, strict=True) if old != stubs[0].address)


def test_load_goes_before_affinity_beyond_the_slack() -> None:
    stubs = made(2)
    own = choose(stubs, KEYS[0], 2)
    other = next(stub for stub in stubs if stub is not own)

    own.num_running = 2
    assert choose(stubs, KEYS[0], 2) is own
    own.num_running = 3
    assert choose(stubs, KEYS[0], 2) is other


def test_no_candidate() -> None:
    assert choose([], KEYS[0], 4) is None


def test_prompts_with_one_beginning_share_a_key_unless_their_salts_differ() -> None:
    long = "x" * 300
    assert affinity_key({"text_input": long + "a"}) == affinity_key({"text_input": long + "b"})
    assert affinity_key({"input_ids": [1, 2]}) != affinity_key({"input_ids": [1, 3]})
    assert affinity_key({"text_input": long, "cache_salt": "a"}) != affinity_key(
        {"text_input": long, "cache_salt": "b"}
    )


def test_a_name_from_the_client_goes_before_the_prompts_beginning() -> None:
    system = {"input_ids": [7] * 100}
    assert affinity_key(system, "a") != affinity_key(system, "b") != affinity_key(system)
    assert affinity_key(system, "a") == affinity_key({"input_ids": [8]}, "a")
    assert affinity_key({**system, "cache_salt": "s"}, "a") != affinity_key({**system, "cache_salt": "t"}, "a")


def test_conversations_with_one_system_prompt_spread_and_each_stays() -> None:
    async def test(made: list[StandInReplica], replicas: Replicas) -> None:
        for seed in [*range(40)] * 2:  # two turns each
            turn = generation(replicas, max_tokens=1, seed=seed)
            turn.affinity = f"conversation {seed}"
            await text(turn)
        first, second = ({request["seed"][0] for request in replica.requests} for replica in made)
        assert first and second and not first & second

    run(test)
