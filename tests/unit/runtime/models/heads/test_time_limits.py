"""Drafts that stop growing before they are late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.tree import TokenTree
from runtime.engine.calls import EngineCall
from runtime.models.heads.engines import drafts
from runtime.models.heads.engines.redrafter import RedrafterEngine
from tests.support.eagle_heads import Eagle, random_context
from tests.support.heads import (
    HIDDEN_SIZE,
    load,
    make_head,
    request,
)


class SlowClock:
    """A clock by which every look at the logits takes a tenth of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, head: Any) -> None:
        self.now_s = 100.0
        logits = head.logits

        def slow(*args: Any) -> Any:
            self.now_s += 0.1
            return logits(*args)

        monkeypatch.setattr(drafts.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(head, "logits", slow)

    def depths(self, engine: Any, *waited_s: float, **shape: Any) -> list[int]:
        """Return how deep the trees of calls become that are given a second and have waited so long in the queue."""
        answers: list[Any] = []
        jobs = []
        for number, waited in enumerate(waited_s, start=1):
            made = request(sequence_id=number, max_depth=9, **shape)
            jobs.append(EngineCall(made, self.now_s - waited + 1.0, answers.append, self.now_s - waited))
        assert engine.advance(jobs) == []
        return [max(answer.tree.depths) for answer in answers]


def test_a_draft_stops_growing_before_it_is_late_or_takes_the_time_of_the_calls_behind_it(
    torch_eagle: Eagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, (ids, features) = SlowClock(monkeypatch, torch_eagle.head), random_context(11, torch_eagle.width)
    assert clock.depths(torch_eagle.new_engine(), 0.0, 0.65, 0.95, ids=ids, features=features, width=2) == [5, 2, 1]
    assert clock.depths(
        torch_eagle.new_engine(), 0.0, ids=ids, features=features, choices=TokenTree.chain([0] * 9)
    ) == [5]


def test_a_long_context_to_read_is_not_taken_for_a_long_level(
    torch_eagle: Eagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, (ids, features) = SlowClock(monkeypatch, torch_eagle.head), random_context(11, torch_eagle.width)
    fuse = torch_eagle.head.fuse

    def slow(features: Any) -> Any:
        clock.now_s += 0.25
        return fuse(features)

    monkeypatch.setattr(torch_eagle.head, "fuse", slow)
    assert clock.depths(torch_eagle.new_engine(), 0.0, ids=ids, features=features, width=2) == [2]


def test_beams_stop_growing_before_they_are_late(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = load("redrafter", make_head("redrafter", tmp_path), target)
    clock, (ids, features) = SlowClock(monkeypatch, head), random_context(11, HIDDEN_SIZE)
    assert clock.depths(RedrafterEngine(head), 0.0, 0.65, ids=ids, features=features, width=2) == [5, 2]
