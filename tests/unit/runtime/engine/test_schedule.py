"""Each rule by which the scheduler divides a plan into passes, with a clock that the test sets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from runtime.engine.schedule import NATIVE_PER_STEP, Kind, Part, ScheduledPass, Scheduler

PROMPT, LARGE, NATIVE, PYTHON = Kind.PROMPT, Kind.LARGE, Kind.NATIVE, Kind.PYTHON


class Machine:
    """A scheduler, and a clock that moves on by the time of each pass."""

    def __init__(self, is_separate: bool = True) -> None:
        self.now_s = 0.0
        self._scheduler = Scheduler(is_separate, lambda: self.now_s)

    def run(self, parts: Sequence[Part[str]], *pass_s: float, others: Sequence[Kind] = ()) -> list[ScheduledPass[str]]:
        """Run a plan, whose passes take pass_s (1 s if it is not given); return the passes."""
        passes, times = [], iter(pass_s)
        for each in self._scheduler.passes([*parts], others):
            passes.append(each)
            self.now_s += next(times, 1.0)
        return passes

    def delayed(self, parts: Sequence[Part[str]]) -> str:
        """Return the names of the parts that wait for a later plan."""
        return names(self._scheduler.delayed([*parts]))


def part(name: str, kind: Kind, answer_by_s: float = math.inf) -> Part[str]:
    """Return a part with a name of one letter."""
    return Part(name, kind, answer_by_s)


def names(parts: Sequence[Part[str]]) -> str:
    return "".join(each.item for each in parts)


def named(passes: Sequence[ScheduledPass[str]]) -> list[str]:
    return [names(each.parts) for each in passes]


@pytest.fixture
def machine() -> Machine:
    return Machine()


P, L, S = part("P", PROMPT), part("L", LARGE), part("S", NATIVE)


@pytest.mark.parametrize("is_atypical", [True, False])
def test_with_torch_all_parts_share_one_pass(is_atypical: bool) -> None:
    parts = [*([P] if is_atypical else []), L, S, part("Y", PYTHON)]
    (only,) = Machine(is_separate=False).run(parts)
    assert only.parts == parts and (only.limit_s, only.is_atypical) == (0.0, is_atypical)


def test_long_parts_run_first_in_a_pass_of_their_own(machine: Machine) -> None:
    long, short = machine.run([S, P, L])
    assert (names(long.parts), names(short.parts)) == ("PL", "S")
    assert long.is_atypical and long.limit_s == 0.0 and not short.is_atypical
    assert (long.num_beside, short.num_beside) == (1, 1)  # a part of a prompt is no step


def test_steps_without_long_parts_go_on_until_their_hold_is_over(machine: Machine) -> None:
    (only,) = machine.run([S, part("T", NATIVE)])
    assert only.limit_s == math.inf and not only.is_atypical


@pytest.mark.parametrize(("others", "goes_on"), [([], True), ([PROMPT], True), ([NATIVE], False), ([LARGE], False)])
def test_steps_do_not_go_on_while_another_has_no_room(machine: Machine, others: list[Kind], goes_on: bool) -> None:
    (only,) = machine.run([S], others=others)
    assert (only.limit_s > 0.0) == goes_on


@pytest.mark.parametrize(("others", "limit_s"), [([], 3.0), ([PROMPT, LARGE], 3.0), ([PYTHON], 0.0)])
def test_beside_long_parts_only_short_steps_without_room_end_the_turn(
    machine: Machine, others: list[Kind], limit_s: float
) -> None:
    _, short = machine.run([S, P], 3.0, others=others)
    assert short.limit_s == limit_s


def test_large_drafts_alone_go_on_and_prompts_alone_do_not(machine: Machine) -> None:
    (large,) = machine.run([L])
    assert large.limit_s == math.inf and not large.is_atypical
    (prompt,) = machine.run([L, P])
    assert prompt.limit_s == 0.0 and prompt.is_atypical


def test_large_drafts_wait_until_short_steps_have_had_as_much_time(machine: Machine) -> None:
    assert machine.delayed([S, L]) == ""
    assert named(machine.run([S, L], 3.0, 1.0)) == ["L", "S"]
    for _ in range(2):
        assert machine.delayed([S, L]) == "L"
        (short,) = machine.run([S, L], 1.0)
        assert names(short.parts) == "S" and short.num_beside == 1
    assert machine.delayed([S, L]) == ""
    assert named(machine.run([S, L])) == ["L", "S"]


def test_the_time_that_short_steps_are_owed_limits_how_long_they_go_on(machine: Machine) -> None:
    machine.run([S, L], 3.0, 1.0)
    (short,) = machine.run([S, L], 0.5)
    assert short.limit_s == 2.0
    (short,) = machine.run([S, L])
    assert short.limit_s == 1.5


def test_prompts_do_not_wait_and_take_large_drafts_with_them(machine: Machine) -> None:
    machine.run([S, L], 3.0, 1.0)
    assert machine.delayed([S, L, P]) == ""
    assert named(machine.run([S, L, P])) == ["LP", "S"]


def test_a_large_draft_waits_for_nobody_where_no_step_does(machine: Machine) -> None:
    machine.run([S, L], 3.0, 1.0)
    assert machine.delayed([L]) == ""
    assert named(machine.run([L])) == ["L"]


def test_nothing_is_owed_after_a_plan_of_short_steps_and_after_long_parts_alone_their_time_is(machine: Machine) -> None:
    machine.run([S, L], 3.0, 1.0)
    machine.run([S])
    assert machine.delayed([S, L]) == ""
    machine.run([P], 2.0)
    assert machine.delayed([S, L]) == "L"


def test_finished_steps_are_answered_before_a_long_pass_that_outlasts_their_hold(machine: Machine) -> None:
    machine.run([S, P], 3.0, 1.0)
    soon, late = part("A", NATIVE, machine.now_s + 3.0), part("B", NATIVE, machine.now_s + 3.5)
    long, short = machine.run([soon, late, P])
    assert names(long.due) == "A" and names(short.parts) == "B" and long.num_beside == 1
    (long,) = machine.run([part("A", NATIVE, machine.now_s), P])
    assert names(long.due) == "A"


def test_few_steps_of_python_get_a_pass_of_their_own_before_many_native_ones(machine: Machine) -> None:
    native = [part(name, NATIVE) for name in "ABC"[:NATIVE_PER_STEP]]
    python, rest = machine.run([*native, part("Y", PYTHON)], 0.5)
    assert (names(python.parts), names(rest.parts)) == ("Y", "ABC")
    assert (python.limit_s, rest.limit_s) == (0.0, 0.5)
    assert (python.num_beside, rest.num_beside) == (3, 1)


def test_many_steps_of_python_share_the_pass_of_the_native_ones(machine: Machine) -> None:
    native = [part(name, NATIVE) for name in "ABC"[: NATIVE_PER_STEP - 1]]
    assert named(machine.run([*native, part("Y", PYTHON)])) == ["ABY"]


def test_finished_steps_are_answered_before_python_s_pass_that_outlasts_their_hold(machine: Machine) -> None:
    native = [part(name, NATIVE) for name in "ABC"]
    machine.run([*native, part("Y", PYTHON)], 2.0)
    native[0] = part("A", NATIVE, machine.now_s + 2.0)
    python, rest = machine.run([*native, part("Y", PYTHON)])
    assert names(python.due) == "A" and names(rest.parts) == "BC" and python.num_beside == 2


def test_beside_a_large_draft_that_waits_steps_count_it(machine: Machine) -> None:
    machine.run([S, L], 9.0, 1.0)
    native = [part(name, NATIVE) for name in "ABC"]
    python, rest = machine.run([*native, part("Y", PYTHON), L], 0.25)
    assert (python.num_beside, rest.num_beside) == (4, 2) and rest.limit_s == 0.25
