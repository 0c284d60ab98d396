"""Triton model `target` without a network: the token at position p is 1 + p % 60, and a test says when a step may end.

A request's cache_salt is its name, or name:script. In the folder SCRIPT_FOLDER the model writes `<name>.began`, the
number of steps that have begun, and `<name>.ended` when the sequence is released. Step n ends once the number in
`<name>.go` is n or more; a name that begins with "free" needs no file. A step that is not released is answered at its
deadline, as by an engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.core.accept import accept_coupled
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import EngineError, Unavailable, UnknownSequence
from orchestrator.core.messages.checks import checked_target_call
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.types import Acceptance
from orchestrator.server.engine_host import EngineHost, EngineModel

FOLDER = Path(os.environ["SCRIPT_FOLDER"])
NUM_TOKENS = 60


class ScriptedEngine:
    """Answers every step on a thread of its own."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._began: dict[str, int] = {}
        self._lock = threading.Lock()

    def preparation(self, request: StepRequest) -> None:
        return None

    def submit(self, request: StepRequest, deadline_s: float, on_answer: Callable[[Any], None]) -> None:
        threading.Thread(target=lambda: on_answer(self._answer(request, deadline_s)), daemon=True).start()

    def release(self, sequence_id: int) -> None:
        if name := self._names.get(sequence_id):
            (FOLDER / f"{name}.ended").touch()

    def watch(self, report: Any) -> None:
        pass

    def on_broken(self, end: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def _answer(self, request: StepRequest, deadline_s: float) -> Any:
        name, _, script = request.delta.cache_salt.partition(":")
        number = self._begin(name, request.delta.sequence_id)
        while not name.startswith("free") and number > _allowed(name):
            if time.monotonic() >= deadline_s and script != "late":
                return Unavailable("the deadline passed before the engine could answer")
            time.sleep(0.005)
        if script == "fails at 3" and number >= 3:
            return EngineError("the engine failed on this request: scripted")
        if script == "forgets at 3" and number >= 3 and request.delta.context_start:
            return UnknownSequence("scripted")
        if script == "knows nothing":
            return UnknownSequence("scripted")
        target_tokens = [1 + (request.delta.prefix_len + int(depth)) % NUM_TOKENS for depth in request.tree.depths]
        path, next_token = accept_coupled(request.tree, target_tokens)
        return Acceptance((7,) if script == "lies at 3" and number >= 3 else path, next_token)

    def _begin(self, name: str, sequence_id: int) -> int:
        with self._lock:
            self._names[sequence_id] = name
            number = self._began[name] = self._began.get(name, 0) + 1
            _write(f"{name}.began", number)
        return number


def _allowed(name: str) -> int:
    file = FOLDER / f"{name}.go"
    return int(file.read_text()) if file.exists() else 0


def _write(name: str, number: int) -> None:
    fresh = FOLDER / f"{name}.new"
    fresh.write_text(str(number))
    fresh.rename(FOLDER / name)


class TritonPythonModel(EngineModel):
    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[StepRequest]:
        return EngineHost("target", ScriptedEngine(), partial(checked_target_call, vocab_size=64, max_nodes=128))
