"""Reloading: the launcher asks the models' processes of a running deployment to apply new settings.

It has two phases, so that either all processes get the new settings or none does: each prepares them (reads tables,
loads drafters) and reports whether that worked, and then each applies them; the launcher restarts a process that does
not. Requests and answers are files in the state folder, which is the launcher's own
(`orchestrator/core/deployment/drain_state.py`): nothing outside the machine can write there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchestrator.core.deployment.config import STATE_FOLDER, ServingConfig
from orchestrator.core.errors import ServingError
from orchestrator.core.methods import DRAFTERS

POLL_S = 0.1
#: Pause after a request that could not be read or answered.
_RETRY_S = 1.0
_REQUEST, _ANSWER = "reload.json", "reload-answer-"
#: The keys that a running deployment can change, and those that it can also change if the target's process drafts.
LIVE = (
    "max_running", "max_waiting", "max_running_per_salt", "max_running_tokens_per_salt", "max_tokens_limit",
    "default_max_tokens", "request_timeout_ms", "max_timeout_ms", "default_speculation", "ngram_tables", "corpus_index",
    "remember_tokens", "structured_output",
)  # fmt: skip
LIVE_WITH_RUNS = (*DRAFTERS, "draft_timeout_ms", "max_nodes")

log = logging.getLogger(__name__)

Commit = Callable[[], None]
#: (settings, keys whose value or files changed) → the function that applies them; raises ServingError if it cannot.
Prepare = Callable[[ServingConfig, Collection[str]], Commit]


class Phase(StrEnum):
    """What the processes are asked for; the engine commits first, so that no request asks for a drafter it lacks."""

    PREPARE = "prepare"
    COMMIT_ENGINE = "commit engine"
    COMMIT = "commit"
    ABORT = "abort"


#: The phases that follow when all processes have prepared, in order.
COMMITS = (Phase.COMMIT_ENGINE, Phase.COMMIT)


def live_keys(config: ServingConfig) -> tuple[str, ...]:
    """Return the keys that this deployment can change while it runs."""
    return LIVE + LIVE_WITH_RUNS if config.is_colocated else LIVE


class ReloadListener:
    """Carries out the reloads of one process, on a thread of its own.

    prepare: what the process has to do. phase: the phase in which it applies the settings.
    """

    def __init__(self, folder: Path, prepare: Prepare, phase: Phase = Phase.COMMIT) -> None:
        self._folder, self._prepare, self._phase = folder, prepare, phase
        self._commit: Commit | None = None
        self._answer: dict[str, Any] | None = None
        self._seen = _read(folder / _REQUEST)  # an older request: this process has read the settings itself

    @classmethod
    def start(cls, prepare: Prepare, phase: Phase = Phase.COMMIT) -> None:
        """Listen forever in a process that a launcher has started; do nothing in any other."""
        if folder := os.environ.get(STATE_FOLDER):
            Path(folder).mkdir(parents=True, exist_ok=True)
            listener = cls(Path(folder), prepare, phase)
            threading.Thread(target=listener.run, name="reload", daemon=True).start()

    def run(self) -> None:
        """Poll for requests, forever."""
        while True:
            time.sleep(POLL_S if self.poll() else _RETRY_S)

    def poll(self) -> bool:
        """Carry out a new request, if there is one, and answer it; return False if that must be tried again."""
        try:
            self._poll()
        except Exception:  # no descriptor, or a full disk: the next attempt may succeed
            log.exception("a reload could not be read or answered; this process tries again")
            return False
        return True

    def _poll(self) -> None:
        request = _read(self._folder / _REQUEST)
        if request and request != self._seen:
            self._seen = request  # first: it is carried out once, however often its answer has to be written
            self._answer = {**_id_of(request), "error": self._carry_out(request)}
        if self._answer is not None:
            _write(self._folder / f"{_ANSWER}{os.getpid()}", self._answer)
            self._answer = None

    def _carry_out(self, request: Mapping[str, Any]) -> str:
        """Return why a request could not be carried out, "" if it was."""
        try:
            if request["phase"] in (Phase.PREPARE, Phase.ABORT):
                self._commit = None
            if request["phase"] == Phase.PREPARE:
                config = ServingConfig.model_validate(request["config"])
                self._commit = self._prepare(config, request["changed"])
            elif request["phase"] == self._phase and self._commit is not None:
                self._commit()
                self._commit = None
        except ServingError as error:
            return str(error)
        except Exception:
            log.exception("a reload failed")
            return "internal error; the server's log has the cause"
        return ""


class Reload:
    """One reload, as the launcher asks for it."""

    def __init__(self, folder: Path, number: int, config: ServingConfig, changed: Collection[str]) -> None:
        self._folder = folder
        self._request = {"number": number, "config": config.model_dump(), "changed": list(changed)}

    def abort(self) -> None:
        """Make the processes drop what they have prepared, drafters included; do not wait for answers."""
        with contextlib.suppress(OSError):  # the next request makes them drop it, too
            _write(self._folder / _REQUEST, {**self._request, "phase": Phase.ABORT})

    def ask(self, phase: Phase, processes: Mapping[int, str], limit_s: float) -> dict[int, str]:
        """Ask all processes for a phase and wait; return {process id: why it failed}, empty if none did.

        The first failure to prepare ends the wait. processes: {process id: model} of those that must take part.
        """
        request = {**self._request, "phase": phase}
        try:
            _write(self._folder / _REQUEST, request)
        except OSError as error:
            return {pid: f"model {model} could not be asked: {error}" for pid, model in processes.items()}
        waiting, failed, end_s = dict(processes), dict[int, str](), time.monotonic() + limit_s
        while waiting and not (failed and phase is Phase.PREPARE):
            for pid, model in list(waiting.items()):
                if (why := self._why_failed(pid, model, request)) is not None:
                    del waiting[pid]
                    failed |= {pid: why} if why else {}
            if waiting and time.monotonic() > end_s:
                return failed | {
                    pid: f"model {model} did not answer within {limit_s:g} s" for pid, model in waiting.items()
                }
            time.sleep(POLL_S / 2)
        return failed

    def _why_failed(self, pid: int, model: str, request: Mapping[str, Any]) -> str | None:
        """Return why a process failed, "" if it succeeded, None as long as it has not answered."""
        is_gone = not Path(f"/proc/{pid}").exists()  # first: it may answer and end
        answer = _read(self._folder / f"{_ANSWER}{pid}")
        if _id_of(answer) == _id_of(request):
            return f"model {model}: {answer['error']}" if answer["error"] else ""
        return f"the process of model {model} ended" if is_gone else None


def _id_of(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"number": message.get("number"), "phase": message.get("phase")}


def _read(file: Path) -> dict[str, Any]:
    """Return the message in a file, {} if there is no file."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return {}
    return found


def _write(file: Path, message: Mapping[str, Any]) -> None:
    """Write a file atomically, so that nobody reads half of it."""
    part = file.with_name(f".{file.name}")
    part.write_text(json.dumps(message), encoding="utf-8")
    part.rename(file)
