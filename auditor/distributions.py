"""Check `law`: over many seeds, the first tokens and the first few together have the target's distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from auditor.confidence import CONFIDENCE, g_test, holm, max_total_variation, total_variation
from auditor.equality import sampling_of
from auditor.reference_model import ReferenceModel
from auditor.requests import Answer, AuditedSystem, AuditRequest, Options, ask_all
from auditor.results import Result
from orchestrator.core.sampling_params import Rule
from orchestrator.core.types import FloatArray
from orchestrator.sampling.distribution import log_p

NUM_TOKENS = 3
LEVEL = 1e-3
#: A truncated support keeps the cells few, so that a few thousand draws say something about each.
DRAWN: Options = {"temperature": 1.0, "top_k": 4, "max_tokens": NUM_TOKENS, "ignore_eos": True}

Probabilities = dict[tuple[int, ...], float]


def distribution_of(reference: ReferenceModel, request: AuditRequest, num_tokens: int) -> Probabilities:
    """Return the probability of every output of so many tokens, by plain passes over all of them."""
    prompt, sampling = reference.encode(request.prompt), sampling_of(request.options)
    law: Probabilities = {(): 1.0}
    for _ in range(num_tokens):
        longer: Probabilities = {}
        for said, probability in law.items():
            probs = np.exp(log_p(reference.shaped([*prompt, *said], len(prompt), sampling), sampling)[0])
            for token in np.flatnonzero(probs).tolist():
                longer[(*said, token)] = probability * float(probs[token])
        law = longer
    return law


@dataclass
class GTests:
    """The G-tests of one audit, judged together so that the chance of one false alarm in all is LEVEL."""

    p_values: list[float] = field(default_factory=list)
    owners: list[tuple[Result, str]] = field(default_factory=list)

    def add(self, result: Result, where: str, counts: FloatArray, law: FloatArray) -> None:
        """Take in a test, and tell its bound; a lossy rule's law is measured and not judged."""
        p_value, seen, most = g_test(counts, law), total_variation(counts, law), max_total_variation(counts, law)
        cells = f"{CONFIDENCE:.0%} confidence, {len(law)} cells"
        result.bounds.append(f"{where}: TV {seen:.3f}, ≤ {most:.3f} ({cells}), p = {p_value:.2g}")
        if not result.lossy:
            self.p_values.append(p_value)
            self.owners.append((result, where))

    def judge(self) -> None:
        """Note a finding for every law that is off."""
        for has_fallen, p_value, (result, where) in zip(
            holm(self.p_values, LEVEL), self.p_values, self.owners, strict=True
        ):
            if has_fallen:
                result.note("distribution", where, f"p > {LEVEL:g} with Holm's correction", f"p = {p_value:.1e}")


def check_distributions(
    reference: ReferenceModel, system: AuditedSystem, requests: Sequence[AuditRequest], num_seeds: int, at_once: int
) -> list[Result]:
    """Return one result per request; each is asked with the seeds 1 … num_seeds, `at_once` of them at a time."""
    tests, results = GTests(), []
    for request in requests:
        answers = ask_all(system, [request.but("", seed=seed) for seed in range(1, num_seeds + 1)], at_once)
        results.append(_look(reference, request, answers, tests))
    tests.judge()
    return results


def _look(reference: ReferenceModel, request: AuditRequest, answers: Sequence[Answer], tests: GTests) -> Result:
    lossy = request.options.get("rule") == Rule.TYPICAL
    result = Result(f"law, {request.name}{' (lossy)' if lossy else ''}", lossy=lossy)
    law = distribution_of(reference, request, NUM_TOKENS)
    counts = Counter(answer.ids for answer in answers)
    result.counts.update(draws=len(answers), tokens=NUM_TOKENS * len(answers))
    for ids in sorted(counts.keys() - law.keys()):
        result.note("support", request.name, "tokens that can come", list(ids))
        del counts[ids]
    if counts:
        for num_tokens, where in ((1, "first token"), (NUM_TOKENS, f"{NUM_TOKENS} tokens")):
            cells = marginal(law, num_tokens)
            seen = marginal(counts, num_tokens)
            tests.add(result, where, np.array([seen.get(cell, 0.0) for cell in cells]), np.array([*cells.values()]))
    return result


def marginal(law: Probabilities | Counter[tuple[int, ...]], num_tokens: int) -> Probabilities:
    """Return the law, or the counts, of the first tokens alone."""
    found: Probabilities = {}
    for ids, value in law.items():
        found[ids[:num_tokens]] = found.get(ids[:num_tokens], 0.0) + value
    return found
