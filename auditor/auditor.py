"""One audit, from the first request to the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from auditor.distributions import check_distributions
from auditor.equality import Comparison, GreedyCheck
from auditor.noise import check_noise
from auditor.reference_model import ReferenceModel
from auditor.replay import Replays
from auditor.requests import Answer, AuditedSystem, AuditRequest, ask_all
from auditor.results import Result
from auditor.texts import TextCheck
from auditor.workload import SETTINGS, Size, distribution_requests, replay_requests, stopped_variants, variants_of

AT_ONCE = 8


@dataclass
class Auditor:
    """Sends requests to a system and judges its answers by the reference.

    settings: names in auditor/settings.py that the system supports. report_progress: takes a line of text.
    at_once: how many requests run concurrently in the checks that use concurrency.
    """

    reference: ReferenceModel
    system: AuditedSystem
    prompts: Sequence[str]
    size: Size
    settings: Sequence[str] = SETTINGS
    report_progress: Callable[[str], None] = lambda text: None
    at_once: int = AT_ONCE
    refused: Result = field(default_factory=lambda: Result("answers"))

    def run(self) -> list[Result]:
        """Run all checks."""
        results = [check_noise()]
        for name, check in (
            ("replay", self.replays),
            ("invariance", self.invariance),
            ("distribution", self.distributions),
        ):
            self.report_progress(f"{name} …")
            results += check()
        return [*results, self.refused]

    def replays(self) -> list[Result]:
        """Decide reported steps again; check the texts, log-probabilities and greedy outputs of the same answers."""
        replays, texts, greedy = Replays(self.reference), TextCheck(self.reference), GreedyCheck(self.reference)
        requests = list(replay_requests(self.prompts, self.settings, self.size.tokens))
        for request, answer in self._answered(requests, self.at_once):
            replays.check(request, answer)
            texts.check(request, answer)
            greedy.check(request, answer)
        return [*replays.close(), *texts.close(), greedy.result]

    def invariance(self) -> list[Result]:
        """Compare one seed's texts under `coupled` for all methods, one by one and concurrently; then with stops."""
        comparison, texts = Comparison("invariance", self.reference), TextCheck(self.reference)
        for index, prompt in enumerate(self.prompts):
            variants = variants_of(index, prompt, self.settings, self.size.tokens)
            together = [variant.but(f", {self.at_once} at once") for variant in variants]
            answers = [*self._answered(variants, 1), *self._answered(together, self.at_once)]
            for request, answer in answers:
                comparison.compare(request, answers[0][1].ids, answer)
            stopped = stopped_variants(variants, answers[0][1].text if answers else "")
            for request, answer in self._answered(stopped, self.at_once):
                texts.check(request, answer)
        text, logprobs = texts.close()
        text.check, logprobs.check = "text, stopped", "log-probs, stopped"
        return [comparison.result, text, logprobs]

    def distributions(self) -> list[Result]:
        """Sample the first tokens after one prompt with many seeds."""
        if not self.size.seeds:
            return []
        requests = distribution_requests(self.prompts[0], self.settings)
        return check_distributions(self.reference, self.system, requests, self.size.seeds, self.at_once)

    def _answered(self, requests: Sequence[AuditRequest], at_once: int) -> list[tuple[AuditRequest, Answer]]:
        """Return the successful requests with their answers; every refused request is a finding."""
        pairs = list(zip(requests, ask_all(self.system, requests, at_once), strict=True))
        self.refused.counts["requests"] += len(pairs)
        for request, answer in pairs:
            if answer.error:
                self.refused.add("refused", request.name, "an answer", answer.error)
        return [(request, answer) for request, answer in pairs if not answer.error]
