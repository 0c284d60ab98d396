"""The watch that ends a Triton which is ready but silent."""

from __future__ import annotations

import pytest

from launcher.answer_watch import NUM_POLLS, AnswerWatch
from launcher.grpc_frontend import GrpcFrontend
from launcher.probe import Probe


class Scripted(Probe):
    """A probe whose answers and passes a test sets."""

    def __init__(self) -> None:
        super().__init__("", "")
        self.silent, self.passes, self.num_asked = True, 7.0, 0

    def is_silent(self) -> bool:
        self.num_asked += 1
        return self.silent

    def num_passes(self) -> float | None:
        return self.passes


class Frontend(GrpcFrontend):
    """A gRPC frontend of which a test says what it does not answer."""

    def __init__(self) -> None:
        super().__init__("", 0)
        self.silent: str | None = None

    def silent_method(self) -> str | None:
        return self.silent


class Site:
    """A server that is watched, and how often it was killed."""

    def __init__(self, limit_s: float = 0.0) -> None:
        self.not_ready: str | None = None
        self.kills, self.said, self.probe, self.frontend = 0, list[str](), Scripted(), Frontend()
        self.watch = AnswerWatch(self, self.probe, self.frontend, self._kill, self.said.append, limit_s)
        self.watch.poll()  # learns how many passes there were

    def why_not_ready(self) -> str | None:
        return self.not_ready

    def poll(self, times: int = NUM_POLLS) -> int:
        """Poll so often; return how often it has been killed so far."""
        for _ in range(times):
            self.watch.poll()
        return self.kills

    def _kill(self) -> None:
        self.kills += 1


def test_a_server_that_is_ready_and_answers_nothing_is_killed_once_until_it_has_been_silent_as_long_again() -> None:
    site = Site()
    assert site.poll(NUM_POLLS - 1) == 0
    assert site.poll(1) == 1
    assert site.said == [
        "Triton is ready, but has left requests without any answer for 0 s, the last one for a token over HTTP; killing it"
    ]
    assert site.poll(NUM_POLLS - 1) == 1
    assert site.poll(1) == 2


def test_one_answer_begins_the_count_anew() -> None:
    site = Site()
    site.poll(NUM_POLLS - 1)
    site.probe.silent = False
    site.poll(1)
    site.probe.silent = True
    assert site.poll(NUM_POLLS - 1) == 0


def test_polls_that_are_quick_do_not_shorten_the_limit() -> None:
    assert Site(limit_s=60.0).poll(20) == 0


def test_a_server_that_is_not_ready_is_not_asked() -> None:
    site = Site()
    site.not_ready = "the server is draining"
    assert site.poll(20) == 0
    assert site.probe.num_asked == 0


def test_a_server_that_ceases_to_be_ready_while_it_is_asked_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    answers = iter([None, "model target has been silent for 4 s"] * 20)
    monkeypatch.setattr(site, "why_not_ready", lambda: next(answers))
    assert site.poll(20) == 0
    assert site.probe.num_asked == 20


def test_a_server_that_makes_passes_is_not_asked() -> None:
    site = Site()
    for _ in range(20):
        site.probe.passes += 1
        site.poll(1)
    assert (site.kills, site.probe.num_asked) == (0, 0)


def test_a_frontend_that_is_silent_is_found_however_busy_the_models_are_over_http() -> None:
    site = Site()
    site.probe.silent = False
    site.frontend.silent = "ModelStreamInfer"
    for _ in range(NUM_POLLS - 1):
        site.probe.passes += 1
        site.poll(1)
    assert site.kills == 0
    assert site.poll(1) == 1
    assert "the last one for ModelStreamInfer over gRPC; killing it" in site.said[0]


def test_one_answer_over_grpc_begins_the_count_anew() -> None:
    site = Site()
    site.probe.silent = False
    for silent in ["ModelInfer"] * (NUM_POLLS - 1) + [None] + ["ModelInfer"] * (NUM_POLLS - 1):
        site.frontend.silent = silent
        site.poll(1)
    assert site.kills == 0
    assert site.poll(1) == 1


def test_the_frontend_of_a_server_that_is_not_ready_is_not_blamed() -> None:
    site = Site()
    site.frontend.silent, site.not_ready = "ServerLive", "the server has ended and is being started again"
    assert site.poll(20) == 0


def test_a_watch_that_has_ended_kills_nothing() -> None:
    site = Site()
    site.watch.end()
    assert site.poll(20) == 0
