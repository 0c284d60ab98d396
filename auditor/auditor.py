"""One audit from the first question to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from auditor.equality import Comparison, GreedyCheck
from auditor.findings import Result
from auditor.law import check_laws
from auditor.noise import check_noise
from auditor.replay import Replays
from auditor.subject import Answer, Subject, VerifyInput, ask_all
from auditor.texts import TextCheck
from auditor.truth import Truth
from auditor.workload import SETTINGS, Size, drawn_questions, questions_of, stopped_variants, variants_of

AT_ONCE = 8


@dataclass
class Auditor:
    """Asks a subject and judges its answers by the truth; settings: of SETTINGS, those that the subject takes.

    say: takes a line of progress. at_once: requests that run side by side, where any do.
    """

    truth: Truth
    subject: Subject
    prompts: Sequence[str]
    size: Size
    settings: Sequence[str] = SETTINGS
    say: Callable[[str], None] = lambda text: None
    at_once: int = AT_ONCE
    refused: Result = field(default_factory=lambda: Result("answers"))

    def run(self) -> list[Result]:
        """Run all checks."""
        results = [check_noise()]
        for name, check in (("replay", self.replays), ("invariance", self.invariance), ("law", self.laws)):
            self.say(f"{name} …")
            results += check()
        return [*results, self.refused]

    def replays(self) -> list[Result]:
        """Decide recorded steps anew; their texts, log-probabilities and greedy outputs are looked at on the way."""
        replays, texts, greedy = Replays(self.truth), TextCheck(self.truth), GreedyCheck(self.truth)
        questions = questions_of(self.prompts, self.settings, self.size.tokens)
        for question, answer in self._asked(questions, self.at_once):
            replays.look(question, answer)
            texts.look(question, answer)
            greedy.look(question, answer)
        return [*replays.close(), *texts.close(), greedy.result]

    def invariance(self) -> list[Result]:
        """Ask with one seed under `coupled` in every way; then again with stop strings that the text holds."""
        same, texts = Comparison("invariance", self.truth), TextCheck(self.truth)
        for index, prompt in enumerate(self.prompts):
            variants = variants_of(index, prompt, self.settings, self.size.tokens)
            answers = [
                *self._asked(variants, 1),
                *self._asked([v.but(f", {self.at_once} at once") for v in variants], self.at_once),
            ]
            self._compare(same, answers)
            stopped = stopped_variants(variants, answers[0][1].text if answers else "")
            for question, answer in self._asked(stopped, self.at_once):
                texts.look(question, answer)
        text, logprobs = texts.close()
        text.check, logprobs.check = "text, stopped", "log-probs, stopped"
        return [same.result, text, logprobs]

    def laws(self) -> list[Result]:
        """Draw the first tokens behind one prompt with many seeds."""
        if not self.size.seeds:
            return []
        questions = drawn_questions(self.prompts[0], self.settings)
        return check_laws(self.truth, self.subject, questions, self.size.seeds, self.at_once)

    @staticmethod
    def _compare(same: Comparison, answers: Sequence[tuple[VerifyInput, Answer]]) -> None:
        for question, answer in answers:
            same.compare(question, answers[0][1].ids, answer)

    def _asked(self, questions: Sequence[VerifyInput], at_once: int) -> list[tuple[VerifyInput, Answer]]:
        """Return questions with their answers, those left out that were refused: each of these is a finding."""
        answers = ask_all(self.subject, questions, at_once)
        self.refused.counts["requests"] += len(answers)
        for question, answer in zip(questions, answers, strict=True):
            if answer.error:
                self.refused.note("refused", question.name, "an answer", answer.error)
        return [pair for pair in zip(questions, answers, strict=True) if not pair[1].error]
