"""Check `distribution`: over many seeds, the first tokens have the target's distribution, alone and jointly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from auditor.confidence import CONFIDENCE, g_test, holm, max_total_variation, total_variation
from auditor.equality import sampling_of
from auditor.reference.distribution import log_p
from auditor.reference_model import ReferenceModel
from auditor.requests import Answer, AuditedSystem, AuditRequest, Options, ask_all
from auditor.results import Result
from orchestrator.core.arrays import FloatArray
from orchestrator.core.sampling_params import Rule

NUM_TOKENS = 3
#: The maximum probability of any false alarm in an audit.
SIGNIFICANCE = 1e-3
#: Top-k keeps the outcomes few, so that a few thousand samples are enough to test each of them.
SAMPLED: Options = {"temperature": 1.0, "top_k": 4, "max_tokens": NUM_TOKENS, "ignore_eos": True}

#: Output tokens → their probability, or how often they were seen.
Weights = dict[tuple[int, ...], float]


def output_probabilities(reference: ReferenceModel, request: AuditRequest, num_tokens: int) -> Weights:
    """Return the probability of every output of `num_tokens` tokens, from one plain pass per prefix."""
    prompt, sampling = reference.encode(request.prompt), sampling_of(request.options)
    outputs: Weights = {(): 1.0}
    for _ in range(num_tokens):
        longer: Weights = {}
        for output, probability in outputs.items():
            logits = reference.processed_logits([*prompt, *output], len(prompt), sampling)
            probs = np.exp(log_p(logits, sampling)[0])
            for token in np.flatnonzero(probs).tolist():
                longer[(*output, token)] = probability * float(probs[token])
        outputs = longer
    return outputs


@dataclass
class GTests:
    """The G-tests of one audit, judged together: the probability of any false alarm is at most SIGNIFICANCE."""

    p_values: list[float] = field(default_factory=list)
    places: list[tuple[Result, str]] = field(default_factory=list)

    def add(self, result: Result, where: str, counts: FloatArray, probs: FloatArray) -> None:
        """Add a test and report its bound; a lossy rule is measured but not judged.

        counts: (k,) float64, how often each outcome was seen. probs: (k,) float64, the target's probabilities.
        """
        p_value, seen = g_test(counts, probs), total_variation(counts, probs)
        cells = f"{CONFIDENCE:.0%} confidence, {len(probs)} cells"
        bound = max_total_variation(counts, probs)
        result.bounds.append(f"{where}: TV {seen:.3f}, ≤ {bound:.3f} ({cells}), p = {p_value:.2g}")
        if not result.lossy:
            self.p_values.append(p_value)
            self.places.append((result, where))

    def judge(self) -> None:
        """Add a finding for every distribution that differs from the target's."""
        rejected = holm(self.p_values, SIGNIFICANCE)
        for is_rejected, p_value, (result, where) in zip(rejected, self.p_values, self.places, strict=True):
            if is_rejected:
                expected = f"p > {SIGNIFICANCE:g} with Holm's correction"
                result.add("distribution", where, expected, f"p = {p_value:.1e}")


def check_distributions(
    reference: ReferenceModel, system: AuditedSystem, requests: Sequence[AuditRequest], num_seeds: int, at_once: int
) -> list[Result]:
    """Return one result per request, which is sent with the seeds 1 … num_seeds, `at_once` of them at a time."""
    tests, results = GTests(), []
    for request in requests:
        answers = ask_all(system, [request.but("", seed=seed) for seed in range(1, num_seeds + 1)], at_once)
        results.append(_check(reference, request, answers, tests))
    tests.judge()
    return results


def _check(reference: ReferenceModel, request: AuditRequest, answers: Sequence[Answer], tests: GTests) -> Result:
    lossy = request.options.get("rule") == Rule.TYPICAL
    result = Result(f"distribution, {request.name}{' (lossy)' if lossy else ''}", lossy=lossy)
    expected = output_probabilities(reference, request, NUM_TOKENS)
    counts = Counter(answer.ids for answer in answers)
    result.counts.update(draws=len(answers), tokens=NUM_TOKENS * len(answers))
    for ids in sorted(counts.keys() - expected.keys()):
        result.add("support", request.name, "tokens of positive probability", list(ids))
        del counts[ids]
    if counts:
        for num_tokens, where in ((1, "first token"), (NUM_TOKENS, f"{NUM_TOKENS} tokens")):
            probs, seen = marginal(expected, num_tokens), marginal(counts, num_tokens)
            tests.add(result, where, np.array([seen.get(ids, 0.0) for ids in probs]), np.array([*probs.values()]))
    return result


def marginal(weights: Weights | Counter[tuple[int, ...]], num_tokens: int) -> Weights:
    """Sum probabilities or counts by the first `num_tokens` tokens."""
    sums: Weights = {}
    for ids, value in weights.items():
        sums[ids[:num_tokens]] = sums.get(ids[:num_tokens], 0.0) + value
    return sums
