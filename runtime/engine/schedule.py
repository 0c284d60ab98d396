"""Which parts of a plan run as which passes, in what order, and for how long steps go on in native code.

With torch, where a batch makes every row cheaper, all parts share one pass. In the native forward pass on a CPU:

- Prompts and steps with large drafts are long parts; the other steps are short. Long parts run first, in a pass of
  their own, so that the short ones take their usual time and can run in native code.
- After a long pass, the short steps are owed as much time as it took: until they have had it, large drafts wait.
  Prompts never wait, since their first tokens would be late; large drafts then run with them.
- If native code decides at least NATIVE_PER_STEP times as many short steps as Python, the latter first get a pass of
  their own, and the others may then go on for as long as it took. In a common pass all would have to be answered, and
  an answer and the next proposal cost as much time in Python as a row in the pass.
- Finished steps are answered before a pass that they do not share if their hold would end during it, assuming that it
  takes as long as the last one of its kind.
- Steps go on in native code until their hold is over; beside long parts, for the time that they are owed. If a step has
  no room in the plan, they do not go on: it should wait for one pass, not for several. Beside long parts, only short
  steps count for this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

#: At least this many native steps for each step that Python decides justify an extra pass: it is cheaper than answering
#: all native steps.
NATIVE_PER_STEP = 3

Item = TypeVar("Item")


class Kind(Enum):
    """What a part computes: a prompt or a part of one, or a step: with a large draft, in native code, or in Python."""

    PROMPT = auto()
    LARGE = auto()
    NATIVE = auto()
    PYTHON = auto()

    @property
    def is_long(self) -> bool:
        """Whether the part takes longer than a usual step."""
        return self in (Kind.PROMPT, Kind.LARGE)


@dataclass(frozen=True, eq=False)
class Part(Generic[Item]):
    """One request's part of a plan. answer_by_s: when its finished steps must be answered; inf: it has none."""

    item: Item
    kind: Kind
    answer_by_s: float = math.inf


@dataclass(frozen=True, eq=False)
class ScheduledPass(Generic[Item]):
    """A pass to run now.

    limit_s: for how long native code may begin further steps; 0: one pass. is_atypical: it takes longer than a pass of
    steps. num_in_separate_pass: steps that do not share it. due: parts whose finished steps must be answered before it.
    """

    parts: list[Part[Item]]
    limit_s: float = 0.0
    is_atypical: bool = False
    num_in_separate_pass: int = 0
    due: list[Part[Item]] = field(default_factory=list)


class Scheduler:
    """Divides plans into passes. is_separate: not all parts share one pass. clock: returns the time in seconds."""

    def __init__(self, is_separate: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_separate, self._clock = is_separate, clock
        self._long_pass_s = 0.0  # time of the last long pass beside short steps
        self._python_pass_s = 0.0  # time of the last separate pass of steps that Python decides
        self._owed_s = 0.0  # time that short steps may still take before the next large draft

    def delayed(self, parts: list[Part[Item]]) -> list[Part[Item]]:
        """Return the parts of a plan that wait for a later one: large drafts while short steps are owed time."""
        long = [part for part in parts if part.kind.is_long]
        may_wait = len(long) < len(parts) and all(part.kind is Kind.LARGE for part in long)
        return long if may_wait and self._owed_s > 0.0 else []

    def passes(self, parts: list[Part[Item]], others: Collection[Kind]) -> Iterator[ScheduledPass[Item]]:
        """Yield the passes of a plan; each must have been run when the next one is asked for, since its time counts.

        others: the kinds of the parts that have no room in the plan.
        """
        short, long = ([part for part in parts if part.kind.is_long is wanted] for wanted in (False, True))
        has_prompts = any(part.kind is Kind.PROMPT for part in long)
        limit_s = 0.0 if has_prompts or any(kind is not Kind.PROMPT for kind in others) else math.inf
        began_s = self._clock()
        if not self._is_separate:
            yield ScheduledPass(parts, is_atypical=has_prompts)
        elif short and long:
            yield from self._both(short, long, others)
        elif long:
            yield ScheduledPass(long, limit_s, is_atypical=has_prompts)
            self._owed_s = self._clock() - began_s
        else:
            yield from self._short(short, limit_s)
            self._owed_s = 0.0

    def _both(
        self, short: list[Part[Item]], long: list[Part[Item]], others: Collection[Kind]
    ) -> Iterator[ScheduledPass[Item]]:
        began_s = self._clock()
        if not self.delayed(short + long):
            due, short = _divided(short, began_s + self._long_pass_s)
            yield ScheduledPass(long, is_atypical=True, num_in_separate_pass=len(short), due=due)
            self._owed_s = self._long_pass_s = self._clock() - began_s
        if not short:
            return
        began_s = self._clock()
        limit_s = self._owed_s if all(kind.is_long for kind in others) else 0.0
        yield from self._short(short, limit_s, num_in_separate_pass=sum(part.kind is Kind.LARGE for part in long))
        self._owed_s -= self._clock() - began_s

    def _short(
        self, parts: list[Part[Item]], limit_s: float, num_in_separate_pass: int = 0
    ) -> Iterator[ScheduledPass[Item]]:
        native, python = ([part for part in parts if part.kind is kind] for kind in (Kind.NATIVE, Kind.PYTHON))
        if not python or len(native) < NATIVE_PER_STEP * len(python):
            yield ScheduledPass(parts, limit_s, num_in_separate_pass=num_in_separate_pass)
            return
        began_s = self._clock()
        due, native = _divided(native, began_s + self._python_pass_s)
        yield ScheduledPass(python, num_in_separate_pass=len(native) + num_in_separate_pass, due=due)
        self._python_pass_s = self._clock() - began_s
        if native:
            limit_s = min(limit_s, self._python_pass_s)
            yield ScheduledPass(native, limit_s, num_in_separate_pass=len(python) + num_in_separate_pass)


def _divided(parts: list[Part[Item]], at_s: float) -> tuple[list[Part[Item]], list[Part[Item]]]:
    """Return the parts whose finished steps must be answered at at_s, and the others."""
    due = [part for part in parts if part.answer_by_s <= at_s]
    return due, [part for part in parts if part.answer_by_s > at_s]
