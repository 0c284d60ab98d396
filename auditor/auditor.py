"""One audit from the first request to the report."""

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
    """Asks a system and judges its answers by the reference; settings: of SETTINGS, those that the system takes.

    say: takes a line of progress. at_once: requests that run side by side, where any do.
    """

    reference: ReferenceModel
    system: AuditedSystem
    prompts: Sequence[str]
    size: Size
    settings: Sequence[str] = SETTINGS
    say: Callable[[str], None] = lambda text: None
    at_once: int = AT_ONCE
    refused: Result = field(default_factory=lambda: Result("answers"))

    def run(self) -> list[Result]:
        """Run all checks."""
        results = [check_noise()]
        for name, check in (("replay", self.replays), ("invariance", self.invariance), ("law", self.distributions)):
            self.say(f"{name} …")
            results += check()
        return [*results, self.refused]

    def replays(self) -> list[Result]:
        """Decide recorded steps anew; their texts, log-probabilities and greedy outputs are looked at on the way."""
        replays, texts, greedy = Replays(self.reference), TextCheck(self.reference), GreedyCheck(self.reference)
        requests = replay_requests(self.prompts, self.settings, self.size.tokens)
        for request, answer in self._asked(requests, self.at_once):
            replays.look(request, answer)
            texts.look(request, answer)
            greedy.look(request, answer)
        return [*replays.close(), *texts.close(), greedy.result]

    def invariance(self) -> list[Result]:
        """Ask with one seed under `coupled` in every way; then again with stop strings that the text holds."""
        same, texts = Comparison("invariance", self.reference), TextCheck(self.reference)
        for index, prompt in enumerate(self.prompts):
            variants = variants_of(index, prompt, self.settings, self.size.tokens)
            answers = [
                *self._asked(variants, 1),
                *self._asked([v.but(f", {self.at_once} at once") for v in variants], self.at_once),
            ]
            self._compare(same, answers)
            stopped = stopped_variants(variants, answers[0][1].text if answers else "")
            for request, answer in self._asked(stopped, self.at_once):
                texts.look(request, answer)
        text, logprobs = texts.close()
        text.check, logprobs.check = "text, stopped", "log-probs, stopped"
        return [same.result, text, logprobs]

    def distributions(self) -> list[Result]:
        """Draw the first tokens behind one prompt with many seeds."""
        if not self.size.seeds:
            return []
        requests = distribution_requests(self.prompts[0], self.settings)
        return check_distributions(self.reference, self.system, requests, self.size.seeds, self.at_once)

    @staticmethod
    def _compare(same: Comparison, answers: Sequence[tuple[AuditRequest, Answer]]) -> None:
        for request, answer in answers:
            same.compare(request, answers[0][1].ids, answer)

    def _asked(self, requests: Sequence[AuditRequest], at_once: int) -> list[tuple[AuditRequest, Answer]]:
        """Return requests with their answers, those left out that were refused: each of these is a finding."""
        answers = ask_all(self.system, requests, at_once)
        self.refused.counts["requests"] += len(answers)
        for request, answer in zip(requests, answers, strict=True):
            if answer.error:
                self.refused.note("refused", request.name, "an answer", answer.error)
        return [pair for pair in zip(requests, answers, strict=True) if not pair[1].error]
