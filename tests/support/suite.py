"""All settings under which texts are compared, in one dtype; which requests run together; their references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from auditor.settings import SETTINGS
from benchmarks.traffic import Prompt
from orchestrator.core.deployment.config import ServingConfig
from tests.support.client_pool import Answer
from tests.support.exactness import SAMPLINGS, Case, Difference, Judge, Oracle, cases_of, run

NUM_AT_ONCE = 8
ALONE, AT_ONCE = "alone", f"{NUM_AT_ONCE} at once"


def by_method() -> list[list[str]]:
    """Return the settings of each method, `none` first."""
    methods: dict[str, list[str]] = {}
    for name, (method, _) in SETTINGS.items():
        methods.setdefault(method, []).append(name)
    return list(methods.values())


@dataclass(frozen=True)
class Unit:
    """Cases that are run and stored together."""

    sampling: str
    name: str
    cases: list[Case]
    at_once: int


def units_of(prompts: Sequence[Prompt], samplings: Sequence[str], turns: Sequence[Sequence[str]]) -> list[Unit]:
    """Return for each sampling a unit per list of settings that runs alone, and a unit in which all run at once."""
    units = []
    for sampling in samplings:
        for names in turns:
            units.append(Unit(sampling, f"{names[0]}, {ALONE}", cases_of(prompts, sampling, [names]), 1))
        units.append(Unit(sampling, f"all, {AT_ONCE}", cases_of(prompts, sampling, turns), NUM_AT_ONCE))
    return units


@dataclass
class Row:
    """One line of the table: one setting under one sampling, alone or among other requests."""

    dtype: str
    sampling: str
    setting: str
    mode: str
    answers: list[tuple[Case, Answer]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The setting in words."""
        return f"{self.sampling}, {self.setting}, {self.mode}"

    @property
    def faults(self) -> list[Difference]:
        """The differences that fail the test: all in float64, those beyond a near tie in other dtypes."""
        return [d for d in self.differences if self.dtype == "float64" or not d.near_tie]

    def cells(self) -> list[str]:
        """Return the row's cells."""
        answers = [answer for _, answer in self.answers]
        steps, tokens = sum(a.num_steps for a in answers), sum(len(a.ids) for a in answers)
        accepted, drafted = sum(a.num_accepted for a in answers), sum(a.num_drafted for a in answers)
        requests_per_pass = sum(a.num_in_pass * a.num_steps for a in answers) / steps
        return [
            self.dtype, self.sampling, self.setting, self.mode, str(len(answers)), str(tokens), f"{tokens / steps:.2f}",
            f"{accepted / drafted:.0%}" if drafted else "–", f"{requests_per_pass:.1f}",
            str(len(self.faults)), str(len(self.differences) - len(self.faults)),
        ]  # fmt: skip


class Suite:
    """All settings in one dtype."""

    def __init__(
        self,
        config: ServingConfig,
        prompts: Sequence[Prompt],
        num_tokens: int,
        dtype: str,
        samplings: Sequence[str] = tuple(SAMPLINGS),
        turns: Sequence[Sequence[str]] = tuple([name] for name in SETTINGS),
    ) -> None:
        """turns: lists of settings, `none` first; each prompt gets one setting of every list, in turn."""
        self.units = units_of(prompts, samplings, turns)
        self.num_tokens = num_tokens
        self._dtype = dtype
        self._oracle = Oracle(config.target, dtype)
        self._judge = Judge(config.target, self._oracle.encode)

    def run(self, unit: Unit, url: str) -> list[Answer]:
        """Run a unit on a server, from a cold cache if its requests run alone, with a shared cache otherwise."""
        salt = f"{unit.sampling}, {unit.name}" if unit.at_once == 1 else ""
        return run(url, unit.cases, self.num_tokens, unit.at_once, salt)

    def judge(self, answers: Sequence[Sequence[Answer]]) -> list[Row]:
        """Compare the answers of all units: at temperature 0 with transformers, above it with `none` alone."""
        rows: dict[tuple[str, str, str], Row] = {}
        expected: dict[tuple[str, str], list[int]] = {}
        for unit, some in zip(self.units, answers, strict=True):
            mode = ALONE if unit.at_once == 1 else AT_ONCE
            for case, answer in zip(unit.cases, some, strict=True):
                row = rows.setdefault(
                    (unit.sampling, case.setting, mode), Row(self._dtype, unit.sampling, case.setting, mode)
                )
                self._compare(row, case, answer, expected)
        return list(rows.values())

    def _compare(self, row: Row, case: Case, answer: Answer, expected: dict[tuple[str, str], list[int]]) -> None:
        key = (row.sampling, case.prompt.id)
        right = expected.get(key) or self._expected(case, answer)
        # Above temperature 0 the others are compared with the first answer, that of `none` alone.
        expected.setdefault(key, right if case.sampling.greedy else answer.ids)
        row.answers.append((case, answer))
        difference = self._judge.compare(case, f"{row.name}, {case.prompt.id}", right, answer.ids)
        if difference:
            row.differences.append(difference)

    def _expected(self, case: Case, answer: Answer) -> list[int]:
        if case.sampling.greedy:
            return self._oracle.greedy(case.prompt.text, self.num_tokens)
        return self._oracle.target_tokens(case.prompt.text, answer.ids, case.sampling)
