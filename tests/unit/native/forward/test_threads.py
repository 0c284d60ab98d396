"""The number of threads of a pass follows what passes took."""

from __future__ import annotations

import pytest

from native.threads import TRIAL_INTERVAL, ThreadChoice


def run(choice: ThreadChoice, times_s: dict[int, float], num_passes: int, num_rows: int = 8) -> list[int]:
    """Passes that take `times_s` with each number of threads; returns the numbers chosen."""
    chosen = []
    for _ in range(num_passes):
        threads = choice.choose(num_rows)
        choice.observe(num_rows, threads, times_s[threads])
        chosen.append(threads)
    return chosen


@pytest.mark.parametrize("best", [1, 2, 4, 8])
def test_the_fastest_number_is_found_and_kept(best: int) -> None:
    times_s = {threads: 1.0 + abs(threads - best) for threads in (1, 2, 4, 8)}
    chosen = run(ThreadChoice(8), times_s, 200)
    assert chosen[-100:].count(best) > 90


def test_a_machine_that_becomes_busy_is_noticed_and_so_is_its_end() -> None:
    choice = ThreadChoice(2)
    idle, busy = {1: 1.0, 2: 0.6}, {1: 1.0, 2: 5.0}
    assert run(choice, idle, 100)[-1] == 2
    assert run(choice, busy, 10)[-1] == 1
    assert run(choice, idle, 40 * TRIAL_INTERVAL)[-1] == 2


def test_passes_of_other_sizes_are_judged_alone() -> None:
    choice = ThreadChoice(2)
    run(choice, {1: 1.0, 2: 5.0}, 50, num_rows=1)
    assert run(choice, {1: 5.0, 2: 1.0}, 50, num_rows=100)[-1] == 2
    assert run(choice, {1: 1.0, 2: 5.0}, 5, num_rows=1)[0] == 1


@pytest.mark.parametrize("slow", (1, 2, 3))
def test_a_first_pass_that_holds_what_is_paid_once_is_not_held_against_a_number_of_threads(slow: int) -> None:
    choice, num_passes = ThreadChoice(2), {1: 0, 2: 0}
    chosen = []
    for _ in range(40):
        threads = choice.choose(16)
        num_passes[threads] += 1
        choice.observe(16, threads, (50.0 if num_passes[threads] == slow else 1.0) / threads)
        chosen.append(threads)
    assert chosen[12:].count(2) >= 27


def test_one_pass_that_was_held_up_changes_nothing() -> None:
    choice, times_s = ThreadChoice(2), {1: 1.0, 2: 0.6}
    run(choice, times_s, 100)
    choice.observe(8, 2, 50.0)
    assert choice.best(8) == 2
