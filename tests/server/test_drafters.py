"""Drafters that lie, fail or hang beside the real target: texts stay the same, nobody waits, the server still stops."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher import process
from launcher.server import Server
from tests.server.conftest import deployment, link, repository, serving
from tests.support.clients import Answer, Stream, ask, metric, until

pytestmark = pytest.mark.server

STOP_LIMIT_S = 3
LONG: dict[str, Any] = {"text_input": "thequickbrownfox", "max_tokens": 80, "end_id": -1}
TASKS: dict[str, dict[str, Any]] = {"greedy": LONG, "sampled": {**LONG, "temperature": 0.8, "seed": 11}}
VOCAB_SIZE, NUM_DRAFT_TOKENS = 64, 60


def int32(values: Any) -> np.ndarray:
    return np.array(list(values), np.int32)


#: Valid trees, right or wrong: (ids, parents).
SOUND = {
    "star": (range(60), [0] * 60),
    "wrong chain": ([7] * 4, range(4)),
    "deep chain": (range(60), range(60)),
    "bush": ([*range(6)] * 7, [0] * 6 + [parent for parent in range(1, 7) for _ in range(6)]),
}
#: Tensors that are not a tree.
BROKEN = {
    "cycle": ([1, 2], [2, 1]),
    "its own parent": ([1], [1]),
    "negative parent": ([1, 2], [0, -1]),
    "parent after its child": ([1, 2, 3], [0, 3, 1]),
    "a million nodes": ([1] * 10**6, range(10**6)),
    "a million children": (range(10**6), [0] * 10**6),
    "more nodes than asked for": ([1] * 61, range(61)),
    "id above the vocabulary": ([1, 64], [0, 1]),
    "negative id": ([-1], [0]),
    "huge ids": ([2**31 - 1] * 3, range(3)),
    "twin children": ([5, 5], [0, 0]),
    "fewer parents than ids": ([1, 2, 3], [0]),
}
#: Arrays of tokens and parents that a tree cannot have.
FOREIGN = {
    "floats": (np.array([np.nan, 1e30], np.float32), np.array([0.0, np.inf], np.float32)),
    "int64": (np.array([2**40, -(2**40)]), np.array([2**40, 7])),
    "text": (np.array([b"one", b"two"]), np.array([b"0", b"1"])),
    "booleans": (np.array([True, True]), np.array([True, True])),
    "two dimensions": (np.ones((2, 2), np.int32), np.ones((2, 2), np.int32)),
    "nothing but ids": (np.array([1], np.int32),),
}
#: Legal answers without a tree.
EMPTY = {"empty arrays": (np.empty(0, np.int32), np.empty(0, np.int32))}


class Script:
    """The folder in which the scripted drafter finds its answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, tree in (SOUND | BROKEN).items():
            self.write(name, *map(int32, tree))
        for name, arrays in (FOREIGN | EMPTY).items():
            self.write(name, *arrays)
        self.write("slow", *map(int32, SOUND["star"]))

    def write(self, name: str, *arrays: np.ndarray) -> None:
        """Have the drafter answer with these arrays."""
        fresh = self.folder / "new.npz"
        np.savez(fresh, **dict(zip(("tokens", "parents"), arrays, strict=False)))
        fresh.rename(self.folder / f"{name}.npz")

    def num_calls(self, name: str) -> int:
        """Return how often the drafter was called."""
        file = self.folder / f"{name}.calls"
        return file.stat().st_size if file.exists() else 0


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def served(checkpoints: Path, script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real target and public models, and the scripted draft."""
    folder = link(checkpoints, tmp_path_factory.mktemp("drafters"))
    models = repository(folder, "target", "speculative", "speculative_unary", draft="draft.py")
    environ = {"SCRIPT_FOLDER": str(script.folder)}
    config = deployment(folder, 'draft = "draft"', 'placement = "separate"')
    with serving(config, repository=models, env=environ, stop_limit_s=STOP_LIMIT_S) as running:
        yield running


@pytest.fixture(scope="module")
def truth(served: Server) -> dict[str, list[int]]:
    """The texts without drafts."""
    return {name: ask(served.grpc_url, speculation="none", **inputs).ids for name, inputs in TASKS.items()}


def drafted(server: Server, task: str, behaviour: str) -> Answer:
    """Send a request whose drafter behaves like this: the cache salt carries the name of its script."""
    inputs = {**TASKS[task], "num_draft_tokens": NUM_DRAFT_TOKENS}
    return ask(server.grpc_url, speculation="draft_model", cache_salt=behaviour, return_stats=True, **inputs)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("behaviour", SOUND)
def test_sound_tree_true_or_not_is_verified_and_changes_no_text(
    served: Server, truth: dict[str, list[int]], behaviour: str, task: str
) -> None:
    def num_verified() -> int:
        answer = drafted(served, task, behaviour)
        assert not answer.error and answer.ids == truth[task]
        total: int = answer.last["total_draft_tokens"]
        return total

    until(num_verified, "a draft")  # the breaker may still be open because of another test


def test_star_of_almost_all_tokens_is_accepted_so_trees_do_arrive(served: Server, truth: dict[str, list[int]]) -> None:
    def num_accepted() -> int:
        answer = drafted(served, "greedy", "star")
        assert answer.ids == truth["greedy"]
        assert answer.last["num_steps"] + answer.last["total_accepted_draft_tokens"] >= len(answer.ids)
        total: int = answer.last["total_accepted_draft_tokens"]
        return total

    until(num_accepted, "an accepted draft")


@pytest.mark.parametrize("task", TASKS)
def test_random_trees_change_no_text(served: Server, script: Script, truth: dict[str, list[int]], task: str) -> None:
    rng = random.Random(3)
    for _ in range(10):
        edges: list[tuple[int, int]] = []
        for node in range(rng.randint(1, 40)):
            edge = (rng.randint(0, node), rng.randrange(VOCAB_SIZE))
            edges += [edge] if edge[0] <= len(edges) and edge not in edges else []
        script.write("random", int32(token for _, token in edges), int32(parent for parent, _ in edges))
        assert drafted(served, task, "random").ids == truth[task]


@pytest.mark.parametrize("behaviour", [*BROKEN, *FOREIGN, *EMPTY, "raises"])
def test_broken_answer_is_dropped_and_changes_no_text(
    served: Server, script: Script, truth: dict[str, list[int]], behaviour: str
) -> None:
    """Both texts at once, because after the first broken answer the drafter is not called for a second."""

    def was_asked() -> bool:
        with Stream(served.grpc_url) as stream:
            for task, inputs in TASKS.items():
                stream.send(
                    task, speculation="draft_model", cache_salt=behaviour, num_draft_tokens=NUM_DRAFT_TOKENS, **inputs
                )
            answers = stream.answers(*TASKS)
        assert {task: answer.ids for task, answer in answers.items()} == truth
        assert not any(answer.last["total_draft_tokens"] for answer in answers.values())
        return script.num_calls(behaviour) > 0

    until(was_asked, "a call that reaches the drafter")


def test_failing_drafter_is_left_alone_for_a_while(served: Server, script: Script) -> None:
    """80 steps call it a few times, not 80 times: after a failure the breaker is open for a second."""
    before = script.num_calls("raises")
    until(lambda: drafted(served, "greedy", "raises") and script.num_calls("raises") > before, "a call")
    assert script.num_calls("raises") - before < 40


def test_calls_of_a_drafter_are_counted_on_the_metrics_port(served: Server, script: Script) -> None:
    def num_calls(what: str) -> float:
        return metric(served.metrics_url, f"spec_draft_{what}_total", model="speculative", drafter="draft")

    until(lambda: drafted(served, "greedy", "raises") and num_calls("failed") > 0, "a failure that is counted")
    assert num_calls("calls") >= num_calls("failed") and num_calls("skipped") > 0


def test_slow_drafter_s_trees_come_too_late_and_are_dropped(
    served: Server, script: Script, truth: dict[str, list[int]]
) -> None:
    """Slower than draft_timeout_ms: when its tree comes, another step is under way."""

    def was_asked() -> bool:
        answer = drafted(served, "sampled", "slow")
        assert answer.ids == truth["sampled"] and answer.last["total_draft_tokens"] == 0
        return script.num_calls("slow") > 0

    until(was_asked, "a call that reaches the drafter")


def test_hanging_drafter_holds_up_neither_requests_nor_the_end_of_the_server(
    served: Server, script: Script, truth: dict[str, list[int]]
) -> None:
    """The drafter sleeps 60 s. This must be the last test of the file, because it stops the server meanwhile."""

    def hangs() -> bool:
        assert drafted(served, "greedy", "hangs").ids == truth["greedy"]
        return script.num_calls("hangs") > 0

    until(hangs, "a call that hangs")
    with Stream(served.grpc_url) as stream:
        for number in range(8):
            inputs = TASKS[["greedy", "sampled"][number % 2]]
            stream.send(f"r{number}", speculation="draft_model", cache_salt="hangs", **inputs)
        answers = stream.answers(*(f"r{number}" for number in range(8)))
    assert [answer.ids for answer in answers.values()] == [truth["greedy"], truth["sampled"]] * 4
    assert ask(served.grpc_url, speculation="prompt_lookup", **LONG).ids == truth["greedy"]
    group = next(iter(served.pids()))
    stopping = threading.Thread(target=served.stop)
    stopping.start()
    stopping.join(30)
    assert not stopping.is_alive(), "the server does not stop while a drafter hangs"
    assert process.group_members(group) == []


def test_a_draft_model_in_a_process_of_its_own_drafts_trees(linked: Path) -> None:
    """It is the target itself: each step of a tree accepts a path, deterministic or sampled."""
    tree = '{"top_k": 3, "draft_len": 4, "min_prob": 0}'
    with serving(deployment(linked, 'draft = "target"', 'placement = "separate"')) as running:
        for name, inputs in (
            TASKS | {"rejection": {**TASKS["sampled"], "temperature": 1.0, "rule": "rejection"}}
        ).items():
            inputs = {**inputs, "max_tokens": 40}
            said = ask(running.grpc_url, speculation="draft_model", speculation_config=tree, **inputs)
            assert said.last["total_draft_tokens"] > 8 * said.last["num_steps"], "a chain has four"
            assert said.last["total_accepted_draft_tokens"] > 2 * said.last["num_steps"]
            if name != "rejection":
                assert said.ids == ask(running.grpc_url, speculation="none", **inputs).ids
