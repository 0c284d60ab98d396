"""Check `replay`: every recorded step is decided anew, and its record is held against its own distributions."""

from __future__ import annotations

import numpy as np

from auditor.confidence import CONFIDENCE, max_error_rate
from auditor.reference_model import ReferenceModel, Replay
from auditor.reported_steps import ReportedSequence, ReportedStep, read_steps
from auditor.requests import Answer, AuditRequest, Options
from auditor.results import Result
from orchestrator.core.context import Context
from orchestrator.core.noise import Stream, gumbel
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.generation.responses import RULE_NAMES

FLOATS = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
REPLAY = "replay"


class ReplayCheck:
    """Replays answers, one by one; `result` has what came of it."""

    def __init__(self, reference: ReferenceModel, name: str = REPLAY) -> None:
        self.result = Result(name)
        self._reference = reference

    def look(self, request: AuditRequest, answer: Answer) -> None:
        """Replay one answer; whatever is wrong with its record, the audit goes on and says so."""
        self.result.counts["requests"] += 1
        try:
            self._look(request, answer, read_steps(answer.steps, self._reference.vocab_size))
        except Exception as error:
            self.result.note("record", request.name, "steps that obey their distributions", repr(error))

    def _look(self, request: AuditRequest, answer: Answer, told: ReportedSequence) -> None:
        self._look_at_record(request, answer, told)
        replay = Replay(self._reference, told)
        for number, step in enumerate(told.steps):
            self._look_at_step(f"{request.name}, step {number}", step, replay, told.sampling)

    def close(self) -> Result:
        """Return the result with its bound."""
        num_steps, num_wrong = self.result.counts["steps"], len({f.where for f in self.result.faults})
        if num_steps:
            rate = max_error_rate(num_wrong, num_steps)
            self.result.bounds.append(f"wrong steps ≤ {rate:.2%} ({CONFIDENCE:.0%} confidence)")
        return self.result

    def _look_at_record(self, request: AuditRequest, answer: Answer, told: ReportedSequence) -> None:
        """Is it the record of this request, and of this answer, without a gap?"""
        name, result = request.name, self.result
        result.expect("prompt", name, self._reference.encode(request.prompt), told.prompt)
        for key, (asked, got) in asked_for(request.options, told.sampling).items():
            result.expect(f"sampling, {key}", name, asked, got)
        result.expect("output ids", name, list(answer.ids), told.tokens[: len(answer.ids)])
        context = Context(told.prompt)
        for number, step in enumerate(told.steps):
            where = f"{name}, step {number}"
            result.expect("prefix_len", where, len(context), step.prefix_len)
            result.expect("context_hash", where, context.rolling_hash(len(context)), step.context_hash)
            context.commit(step.tokens)
        surplus = len(told.tokens) - len(answer.ids)
        result.expect("last step reaches the end", name, True, 0 <= surplus < len(told.steps[-1].tokens))

    def _look_at_step(self, where: str, step: ReportedStep, replay: Replay, sampling: Sampling) -> None:
        counts = self.result.counts
        counts["steps"] += 1
        counts["tokens"] += len(step.tokens)
        counts["drafted"] += step.tree.num_nodes
        counts["accepted"] += len(step.walk.path)
        self.result.expect("a source per node", where, step.tree.num_nodes, len(step.sources))
        self._look_at_drafts(where, step, sampling)
        expected, is_tie = replay.decide(step)
        if expected != step.walk:
            self.result.note("decision", where, _worded(expected), _worded(step.walk), near_tie=is_tie)

    def _look_at_drafts(self, where: str, step: ReportedStep, sampling: Sampling) -> None:
        """Were the drafts drawn from the q that went along, and with the drafter's own noise?"""
        if not step.q or not sampling.rule.uses_q:
            return
        for parent, siblings in enumerate(step.tree.children):
            if siblings:
                due = drawn(step, next(iter(siblings.values())), parent, sampling)[: len(siblings)]
                self.result.expect("drafts drawn from q", where, due, list(siblings))


def drawn(step: ReportedStep, node: int, parent: int, sampling: Sampling) -> list[int]:
    """Return the tokens of the q of `node`, a child of `parent`, in the order in which its noise draws them."""
    q, position = step.q[node - 1], step.prefix_len + int(step.tree.depths[parent])
    noise = gumbel(sampling.seed, position, q.ids, Stream.DRAFT, step.prefix_len)
    order: list[int] = q.ids[np.argsort(-(np.log(q.probs) + noise), kind="stable")].tolist()
    return order


def asked_for(options: Options, told: Sampling) -> dict[str, tuple[object, object]]:
    """Return what of the sampling was asked for by name, as an FP32 tensor has it, and what the record says."""
    asked: dict[str, object] = {name: float(np.float32(options[name])) for name in FLOATS if name in options}
    asked |= {name: options[name] for name in ("top_k", "seed", "min_tokens") if name in options}
    asked["rule"] = Rule(options.get("rule") or Rule.COUPLED)
    return {name: (value, getattr(told, name)) for name, value in asked.items()}


def _worded(walk: tuple[tuple[int, ...], int]) -> str:
    path, next_token = walk
    return f"path {list(path)} and token {next_token}"


class Replays:
    """A replay check per rule, `typical` apart as lossy: its steps must still be those of its own rule."""

    def __init__(self, reference: ReferenceModel) -> None:
        self._checks: dict[Rule, ReplayCheck] = {}
        self._reference = reference

    def look(self, request: AuditRequest, answer: Answer) -> None:
        """Replay one answer."""
        rule = Rule(request.options.get("rule") or Rule.COUPLED)
        if rule not in self._checks:
            self._checks[rule] = ReplayCheck(self._reference, f"{REPLAY}, {RULE_NAMES.get(rule, rule)}")
        self._checks[rule].look(request, answer)

    def close(self) -> list[Result]:
        """Return the results by rule."""
        return [check.close() for check in self._checks.values()]
