"""The auditor finds nothing in the sound code, and every bug that is planted in the served side of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from auditor import __main__ as command
from auditor.auditor import Auditor
from auditor.confidence import g_test, holm, max_error_rate, max_total_variation, total_variation
from auditor.noise import check_noise
from auditor.reference_model import ReferenceModel
from auditor.replay import ReplayCheck
from auditor.requests import Answer, AuditRequest
from auditor.results import Result
from auditor.texts import cut, expected_text, leaks
from auditor.workload import SETTINGS, Size
from tests.support.planted_bugs import (
    DRAWN,
    PLANTED,
    Patch,
    PlantedBug,
    drafts_left_out_by_value,
    u_may_be_0,
    u_may_be_1,
)
from tests.support.served_in_process import InProcessSystem
from tests.support.tiny_models import make_like, make_tiny_target, write_byte_tokenizer

PROMPTS = ("abcabcabcab", "thequickbrownfox", "xyxyxyz", "aabbaabb", "lorem", "0101100", "zzz", "abacab")
SIZE = Size(prompts=2, tokens=20, seeds=0)


class World(NamedTuple):
    """Checkpoints of a target and of a drafter much like it, the judge, and texts to draft from."""

    target: Path
    draft: Path
    reference: ReferenceModel
    learnt: tuple[str, ...]

    def audit(self, phase: str = "run", settings: Sequence[str] = SETTINGS, size: Size = SIZE) -> list[Result]:
        """Audit the served code, or a phase of it, in fresh engines."""
        system = InProcessSystem(self.target, self.draft, self.learnt)
        auditor = Auditor(self.reference, system, PROMPTS[: size.prompts], size, settings, at_once=1)
        results: list[Result] = getattr(auditor, phase)()
        return results


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("audited")
    make_tiny_target(folder / "target")
    make_like(folder / "target", folder / "draft", 0.05)
    write_byte_tokenizer(folder / "draft")
    reference, options = ReferenceModel(str(folder / "target")), {"max_tokens": 24, "temperature": 0.9}
    system, seeds = InProcessSystem(folder / "target", folder / "draft"), range(1, 13)
    said = [prompt + system.ask(prompt, {**options, "seed": seed}).text for prompt in PROMPTS[:2] for seed in seeds]
    return World(folder / "target", folder / "draft", reference, tuple(said))


def faults(results: Sequence[Result]) -> set[tuple[str, str]]:
    """Return (check, what) of all that was found."""
    return {(result.check, finding.what) for result in results for finding in result.faults}


# The sound code


def test_the_sound_engine_has_no_finding_and_every_check_had_something_to_look_at(world: World) -> None:
    results = world.audit(size=replace(SIZE, seeds=12), settings=("none", "draft_model 4", "suffix wide"))

    assert not faults(results), [str(finding) for result in results for finding in result.findings]
    by_name = {result.check: result for result in results}
    for rule in ("coupled", "rejection", "typical (lossy)"):
        counts = by_name[f"replay, {rule}"].counts
        assert 0 < counts["accepted"] < counts["drafted"] and counts["steps"] > 50
    for name in (
        "noise",
        "text",
        "text, stopped",
        "log-probs",
        "greedy",
        "invariance",
        "distribution, block, draft_model 4",
    ):
        assert by_name[name].counts["tokens"] + by_name[name].counts["draws"] > 0, name
    assert by_name["text, stopped"].counts["stopped"] == by_name["text, stopped"].counts["requests"]


@pytest.mark.long
def test_every_setting_is_replayed_without_a_finding(world: World) -> None:
    results = world.audit("replays")

    assert not faults(results), [str(finding) for result in results for finding in result.findings]


# Planted bugs

#: One of each kind of finding; `make test-long` plants all.
QUICK = ("position_off_by_one", "q_of_another_step", "nothing_held_back", "rows_not_moved")


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(bug, id=bug.bug.__name__, marks=() if bug.bug.__name__ in QUICK else pytest.mark.long)
        for bug in PLANTED
    ],
)
def test_a_planted_bug_is_found(world: World, monkeypatch: Patch, planted: PlantedBug) -> None:
    planted.bug(monkeypatch)

    found = faults(world.audit(planted.phase, planted.settings, replace(SIZE, prompts=planted.prompts)))

    assert planted.found <= found, found


@pytest.mark.long
def test_drafts_left_out_by_their_value_are_found_by_the_distribution_alone(world: World, monkeypatch: Patch) -> None:
    drafts_left_out_by_value(monkeypatch)

    replayed = faults(world.audit("replays", DRAWN))
    drawn = faults(world.audit("distributions", DRAWN, Size(1, 3, 250)))

    assert not replayed
    assert {
        ("distribution, rejection, draft_model 4", "distribution"),
        ("distribution, block, draft_model 4", "distribution"),
    } <= drawn
    assert "distribution, coupled, draft_model 4" not in {check for check, _ in drawn}  # whatever is drafted


@pytest.mark.parametrize("bug", [u_may_be_0, u_may_be_1])
def test_a_u_of_0_or_1_is_found_by_the_noise_check(monkeypatch: Patch, bug: Callable[[Patch], None]) -> None:
    assert not faults([check_noise(1000)])
    bug(monkeypatch)

    assert {("noise", "0 < u < 1"), ("noise", "numpy and torch agree")} <= faults([check_noise(1000)])


# The parts


def test_a_record_that_lies_is_found(world: World) -> None:
    options = {"max_tokens": 8, "return_steps": True, "seed": 3, "temperature": 1.0, "rule": "rejection"}
    request = AuditRequest("q", PROMPTS[0], options)
    system = InProcessSystem(world.target, world.draft)
    answer = system.ask(request.prompt, {**options, "speculation": "draft_model"})

    def found(**changes: Any) -> set[str]:
        check, told = ReplayCheck(world.reference), json.loads(answer.steps)
        told["sampling"] |= changes.pop("sampling", {})
        told["steps"][1] |= changes
        check.check(request, replace(answer, steps=json.dumps(told)))
        return {finding.what for finding in check.result.findings}

    assert found() == set()
    assert found(context_hash=1) == {"context_hash"}
    assert "prefix_len" in found(prefix_len=99)
    assert found(sampling={"seed": 4}) >= {"sampling, seed", "decision"}
    assert found(sources=["x"] * 9) == {"a source per node"}
    assert "output ids" in found(next_token=63)
    assert found(node_ids=[64]) == found(node_parents=[7]) == {"record"}


def test_a_near_tie_is_told_apart_from_a_fault_in_a_rounded_dtype(world: World) -> None:
    request = AuditRequest("q", PROMPTS[0], {"max_tokens": 2, "return_steps": True})
    answer = InProcessSystem(world.target, world.draft).ask(*request[1:])
    told, rounded = json.loads(answer.steps), ReferenceModel(str(world.target), "bfloat16")
    row = world.reference.logits(world.reference.encode(PROMPTS[0]))[0]
    second = int(np.argsort(-row)[1])
    told["steps"] = told["steps"][:1]
    told["steps"][0]["next_token"] = second
    ties = []
    for near_tie in (0.0, 1e-9, float(row.max() - row[second])):
        rounded.rounding, check = near_tie, ReplayCheck(rounded)
        check.check(request, replace(answer, ids=(second,), steps=json.dumps(told)))
        ties.append(check.result.findings[0].near_tie)
    assert ties == [False, False, True]


def test_bounds_are_those_of_the_papers() -> None:
    assert max_error_rate(0, 1000) == pytest.approx(-np.log(0.01) / 1000, rel=0.01)  # the rule of three, at 99%
    assert max_error_rate(5, 5) == 1.0 and 0.1 < max_error_rate(5, 50) < 0.3
    counts, law = np.array([50.0, 50.0]), np.array([0.6, 0.4])
    assert total_variation(counts, law) == pytest.approx(0.1)
    assert max_total_variation(counts, law) == pytest.approx(0.1 + np.sqrt(2 * np.log(2 / 0.01) / 100) / 2)
    assert g_test(np.array([600.0, 400.0]), law) > 0.99 and g_test(np.array([500.0, 500.0]), law) < 1e-6
    assert holm([0.04, 0.001, 0.03], 0.05) == [False, True, False] and holm([0.01, 0.02, 0.04], 0.05) == [True] * 3


def test_the_text_of_tokens_is_cut_at_the_stop_that_is_complete_first(world: World) -> None:
    def ended(text: str, **options: Any) -> tuple[str, str]:
        return expected_text(world.reference, world.reference.encode(text), AuditRequest("q", "ab", options))

    assert ended("cdef") == ("cdef", "length")
    assert ended("cdef", stop_words=["ef", "de"]) == ("c", "stop")
    assert ended("cdef", stop_ids=world.reference.encode("e")) == ("cd", "stop")
    assert cut("abc", ["bc", "c"]) == "a" and cut("abc", ["x"]) is None
    assert list(leaks(["on", "e t", "wo"], ["e tw", "two", "three"])) == [("e tw", 2), ("two", 2)]


def test_the_report_names_checks_bounds_and_findings_and_sets_the_exit_status(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sound, broken = Result("replay, coupled", bounds=["wrong steps ≤ 1%"]), Result("greedy")
    sound.add("decision", "prompt 1, step 2", 4, 5, near_tie=True)
    sound.counts["steps"] += 7
    monkeypatch.setattr(command, "audit", lambda url, options, size: [sound, broken])
    arguments = ["--url", "localhost:1", "--quick", "--tokens", "5", "--json", str(tmp_path / "report.json")]

    assert command.main(arguments) == 0
    broken.add("greedy", "prompt 1, output token 0", 4, 5)
    assert command.main(arguments) == 1

    said = capsys.readouterr().out
    assert "wrong steps ≤ 1%" in said and "! greedy: prompt 1, output token 0: expected 4, got 5" in said
    kept = json.loads((tmp_path / "report.json").read_text())
    assert [entry["num_faults"] for entry in kept] == [0, 1] and kept[0]["counts"] == {"steps": 7}


def test_a_refused_answer_is_a_finding_and_a_lossy_distribution_is_no_fault() -> None:
    class Refusing:
        def ask(self, prompt: str, options: Any) -> Answer:
            return Answer(error="no")

    auditor = Auditor(None, Refusing(), PROMPTS, SIZE, ("none",))  # type: ignore[arg-type]
    assert auditor._answered([AuditRequest("q", "a", {})], 1) == [] and faults([auditor.refused]) == {
        ("answers", "refused")
    }
    lossy = Result("law", lossy=True)
    lossy.add("distribution", "first token", 1, 0)
    assert not lossy.faults
