"""The scheduler's rules, with a clock that only passes move."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest

from runtime.engine.schedule import NATIVE_PER_STEP, Kind, Part, ScheduledPass, Scheduler

PROMPT, LARGE, NATIVE, PYTHON = (Part(kind.name, kind) for kind in Kind)
LONG_S, STEP_S = 8.0, 3.0


class Engine:
    """Runs the passes of a scheduler; each takes LONG_S with a long part, and STEP_S without one."""

    def __init__(self, is_separate: bool = True) -> None:
        self.now_s = 100.0
        self.scheduler = Scheduler(is_separate, lambda: self.now_s)

    def run(self, parts: Sequence[Part[str]], others: Collection[Kind] = ()) -> list[ScheduledPass[str]]:
        """Run a plan, and return its passes. others: the kinds of the parts without room in it."""
        passes = []
        for each in self.scheduler.passes([*parts], others):
            passes.append(each)
            self.now_s += LONG_S if any(part.kind.is_long for part in each.parts) else STEP_S
        return passes


@pytest.fixture
def engine() -> Engine:
    return Engine()


def natives(number: int) -> list[Part[str]]:
    return [Part(f"native {place}", Kind.NATIVE) for place in range(number)]


def finished(kind: Kind, answer_by_s: float) -> Part[str]:
    return Part(f"finished by {answer_by_s:g}", kind, answer_by_s)


def parts_of(passes: list[ScheduledPass[str]]) -> list[list[Part[str]]]:
    return [each.parts for each in passes]


@pytest.mark.parametrize("parts", ([NATIVE, PROMPT, LARGE], [LARGE, NATIVE], [*natives(NATIVE_PER_STEP), PYTHON]))
def test_all_parts_share_one_pass_of_torch(parts: list[Part[str]]) -> None:
    engine = Engine(is_separate=False)
    for _ in range(2):
        (only,) = engine.run(parts)
        assert only.parts == parts and only.limit_s == only.num_in_separate_pass == 0 and not only.due
        assert only.is_atypical == (PROMPT in parts) and not engine.scheduler.delayed(parts)


def test_long_parts_run_first_in_a_pass_of_their_own(engine: Engine) -> None:
    long, short = engine.run([NATIVE, PROMPT, LARGE, PYTHON])
    assert (long.parts, long.is_atypical, long.limit_s, long.num_in_separate_pass) == ([PROMPT, LARGE], True, 0.0, 2)
    assert (short.parts, short.is_atypical, short.num_in_separate_pass) == (
        [NATIVE, PYTHON],
        False,
        1,
    )  # LARGE: prompts do not count


@pytest.mark.parametrize(("part", "is_atypical"), ((PROMPT, True), (LARGE, False)))
def test_long_parts_alone_are_usual_unless_they_have_prompts(
    engine: Engine, part: Part[str], is_atypical: bool
) -> None:
    (only,) = engine.run([part])
    assert only.is_atypical is is_atypical


@pytest.mark.parametrize("long", ([LARGE], [LARGE, NATIVE], [PROMPT, NATIVE]))
def test_large_drafts_wait_until_short_steps_have_had_the_time_of_a_long_pass(
    engine: Engine, long: list[Part[str]]
) -> None:
    engine.run(long)
    left_s = LONG_S - STEP_S * (NATIVE in long)
    while left_s > 0.0:
        assert engine.scheduler.delayed([LARGE, NATIVE]) == [LARGE]
        (short,) = engine.run([LARGE, NATIVE])
        assert (short.parts, short.limit_s, short.num_in_separate_pass) == ([NATIVE], left_s, 1)
        left_s -= STEP_S
    assert not engine.scheduler.delayed([LARGE, NATIVE])
    assert parts_of(engine.run([LARGE, NATIVE])) == [[LARGE], [NATIVE]]


def test_short_steps_are_owed_no_time_after_a_pass_without_long_parts(engine: Engine) -> None:
    engine.run([PROMPT])
    engine.run([NATIVE])
    assert parts_of(engine.run([LARGE, NATIVE])) == [[LARGE], [NATIVE]]


def test_prompts_do_not_wait_and_take_large_drafts_along(engine: Engine) -> None:
    engine.run([PROMPT])
    assert not engine.scheduler.delayed([PROMPT, LARGE, NATIVE])
    assert parts_of(engine.run([PROMPT, LARGE, NATIVE])) == [[PROMPT, LARGE], [NATIVE]]


def test_large_drafts_do_not_wait_where_there_is_no_short_step(engine: Engine) -> None:
    engine.run([PROMPT])
    assert not engine.scheduler.delayed([LARGE])
    assert parts_of(engine.run([LARGE])) == [[LARGE]]


def test_steps_that_python_decides_have_a_pass_of_their_own_beside_many_of_native_code(engine: Engine) -> None:
    parts = natives(NATIVE_PER_STEP)
    python, native = engine.run([*parts, PYTHON])
    assert (python.parts, python.limit_s, python.num_in_separate_pass) == ([PYTHON], 0.0, NATIVE_PER_STEP)
    assert (native.parts, native.limit_s, native.num_in_separate_pass) == (parts, STEP_S, 1)


def test_steps_share_a_pass_with_too_many_that_python_decides(engine: Engine) -> None:
    parts = [*natives(NATIVE_PER_STEP), PYTHON, PYTHON]
    assert parts_of(engine.run(parts)) == [parts]
    assert parts_of(engine.run([PYTHON])) == [[PYTHON]]


def test_every_pass_counts_the_steps_of_the_others(engine: Engine) -> None:
    large, python, native = engine.run([LARGE, *natives(NATIVE_PER_STEP), PYTHON])
    assert [large.num_in_separate_pass, python.num_in_separate_pass, native.num_in_separate_pass] == [
        NATIVE_PER_STEP + 1,
        NATIVE_PER_STEP + 1,
        2,
    ]


def test_steps_beside_two_other_passes_go_on_for_the_shorter_of_both_times(engine: Engine) -> None:
    parts = [LARGE, *natives(NATIVE_PER_STEP), PYTHON]
    assert engine.run(parts)[-1].limit_s == STEP_S  # of LONG_S
    _, native = engine.run(parts)
    assert native.limit_s == LONG_S - 2 * STEP_S  # what was left of it after the two passes


def test_steps_are_answered_before_a_long_pass_that_would_last_beyond_their_hold(engine: Engine) -> None:
    engine.run([PROMPT, NATIVE])
    due, other = finished(Kind.NATIVE, engine.now_s + LONG_S), finished(Kind.PYTHON, engine.now_s + LONG_S + 1.0)
    long, short = engine.run([PROMPT, due, other])
    assert (long.due, long.num_in_separate_pass, short.parts, short.due) == ([due], 1, [other], [])
    (only,) = engine.run([PROMPT, due])
    assert only.due == [due]


def test_steps_are_answered_before_a_pass_of_python_that_would_last_beyond_their_hold(engine: Engine) -> None:
    parts = natives(NATIVE_PER_STEP)
    engine.run([*parts, PYTHON])
    due, other = finished(Kind.NATIVE, engine.now_s + STEP_S), finished(Kind.NATIVE, engine.now_s + STEP_S + 1.0)
    python, native = engine.run([due, other, *parts[2:], PYTHON])
    assert (python.due, python.num_in_separate_pass, native.parts) == ([due], NATIVE_PER_STEP - 1, [other, *parts[2:]])
    assert parts_of(engine.run([*[due] * NATIVE_PER_STEP, PYTHON])) == [[PYTHON]]


def test_only_a_pass_that_steps_do_not_share_makes_them_due(engine: Engine) -> None:
    engine.run([PROMPT])
    late = finished(Kind.NATIVE, engine.now_s)
    for parts in ([LARGE, late], [late, PYTHON], [late]):  # the large draft waits
        (only,) = engine.run(parts)
        assert late in only.parts and not only.due


@pytest.mark.parametrize("part", (NATIVE, LARGE))
@pytest.mark.parametrize("other", Kind)
def test_steps_go_on_until_their_hold_is_over_unless_one_has_no_room(
    engine: Engine, part: Part[str], other: Kind
) -> None:
    (alone,), (beside,) = engine.run([part]), engine.run([part], [other])
    assert alone.limit_s == math.inf
    assert beside.limit_s == (math.inf if other is Kind.PROMPT else 0.0)


@pytest.mark.parametrize("other", Kind)
def test_steps_go_on_beside_long_parts_for_the_time_owed_unless_a_short_one_has_no_room(
    engine: Engine, other: Kind
) -> None:
    long, short = engine.run([PROMPT, NATIVE], [other])
    assert (long.limit_s, short.limit_s) == (0.0, LONG_S if other.is_long else 0.0)


def test_large_drafts_do_not_go_on_beside_a_prompt(engine: Engine) -> None:
    (only,) = engine.run([PROMPT, LARGE])
    assert only.limit_s == 0.0
