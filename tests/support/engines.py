"""Engines in this process, without Triton, and a Target over an engine thread."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import ServingError
from orchestrator.core.grammar import Grammars
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, HiddenStates, StepOptions
from orchestrator.drafting.none import NoProposer
from runtime.engine.calls import Engine, EngineCall
from runtime.engine.paged import PagedModel
from runtime.engine.target import TargetEngine
from runtime.engine.target_thread import TargetThread
from runtime.engine.thread import EngineThread
from runtime.models.load import load_model
from tests.support.decode import decode

LIMIT_S = 300.0


def make_paged(
    folder: Path,
    dtype: str = "float64",
    block_tokens: int = 4,
    features: HiddenStates = HiddenStates.NONE,
    kernels: str = "torch",
    **options: Any,
) -> PagedModel:
    """Load a checkpoint with small blocks, so that tests cross many block boundaries."""
    memory_mb = options.pop("memory_mb", 4)
    model = load_model(str(folder), "cpu", dtype, features, kernels=kernels)
    return PagedModel(model, memory_mb, block_tokens, **options)


class EngineTarget:
    """Implements Target over an engine thread; sends the whole context in every step if `stateless`."""

    def __init__(self, engine: EngineThread[StepRequest], sequence_id: int, stateless: bool = False) -> None:
        self.engine = engine
        self.sequence_id = sequence_id
        self.stateless = stateless
        self.sent = 0

    def step(
        self,
        context: Context,
        tree: TokenTree,
        sampling: Sampling,
        options: StepOptions,
        q: tuple[Distribution, ...] = (),
    ) -> Acceptance:
        """Submit one step and wait for its answer."""
        start = 0 if self.stateless else self.sent
        delta = delta_of(context, start, self.sequence_id, "")
        answer = ask(self.engine, StepRequest(delta, tree, sampling, options, 60_000, q))
        self.sent = len(context)
        return answer

    def release(self) -> None:
        """End the sequence."""
        self.engine.release(self.sequence_id)
        self.sent = 0


def submit(engine: EngineThread[Any], request: Any) -> queue.SimpleQueue[Any]:
    """Submit a call; return the queue that its answer will be put in."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.submit(request, time.monotonic() + LIMIT_S, answers.put)
    return answers


def ask(engine: EngineThread[Any], request: Any) -> Any:
    """Submit a call and return its answer; raises the error that the engine answers with."""
    answer = submit(engine, request).get(timeout=LIMIT_S)
    if isinstance(answer, ServingError):
        raise answer
    return answer


def advance(engine: Engine[Any], *requests: Any) -> tuple[list[Any], int]:
    """Return an engine's answers to calls that come together, without a thread, and how often it advanced them."""
    answers: dict[int, Any] = {}
    calls = [
        EngineCall(request, 1e12, lambda answer, place=place: answers.__setitem__(place, answer))
        for place, request in enumerate(requests)
    ]
    num_advances = 0
    while calls:
        calls = engine.advance(calls)
        num_advances += 1
    return [answers[place] for place in range(len(requests))], num_advances


def start_target(paged: PagedModel, grammars: Grammars | None = None) -> TargetThread:
    """Start a target engine over a paged model."""
    engine = TargetThread(TargetEngine(paged), "test-target", grammars=grammars)
    engine.start()
    return engine


def own_text(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy text of our own engine in float64 over a checkpoint."""
    engine = start_target(make_paged(folder))
    text, _ = decode(EngineTarget(engine, 1), NoProposer(), prompt, Sampling(), Limits(num_tokens, 200, 64))
    engine.close()
    return text


def node_paths(ids: list[int], tree: TokenTree) -> list[list[int]]:
    """Return the token path of the root and of every node, context included."""
    paths = [ids]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*paths[parent], token])
    return paths
