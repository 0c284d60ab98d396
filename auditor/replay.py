"""Check `replay`: every reported step is decided again, and the report is checked against its own invariants."""

from __future__ import annotations

import numpy as np

from auditor.confidence import CONFIDENCE, max_error_rate
from auditor.equality import FLOATS
from auditor.reference.elementary import log
from auditor.reference.noise import gumbel
from auditor.reference_model import ReferenceModel, Replay
from auditor.reported_steps import ReportedSequence, ReportedStep, read_steps
from auditor.requests import Answer, AuditRequest, Options
from auditor.results import Result
from orchestrator.core.accept import AcceptedPath
from orchestrator.core.context import Context
from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.static_trees import MAX_DEPTH, MAX_WIDTH
from orchestrator.core.types import Distribution
from orchestrator.server.responses import RULE_NAMES

REPLAY = "replay"
#: Maximum candidates that a drafter makes for one tree, and how many of their numbers are tried at a time.
MAX_CANDIDATES, NUMBERS_AT_ONCE = MAX_WIDTH * MAX_WIDTH * MAX_DEPTH, 512


class ReplayCheck:
    """Replays answers one by one into `result`."""

    def __init__(self, reference: ReferenceModel, name: str = REPLAY) -> None:
        self.result = Result(name)
        self._reference = reference

    def check(self, request: AuditRequest, answer: Answer) -> None:
        """Replay one answer; a report that cannot be replayed is a finding, and the audit goes on."""
        self.result.counts["requests"] += 1
        try:
            reported = read_steps(answer.steps, self._reference.vocab_size)
            self._check_report(request, answer, reported)
            replay = Replay(self._reference, reported)
            for number, step in enumerate(reported.steps):
                self._check_step(f"{request.name}, step {number}", step, replay, reported.sampling)
        except Exception as error:
            self.result.add("record", request.name, "steps that keep their invariants", repr(error))

    def close(self) -> Result:
        """Return the result with its bound."""
        num_steps, num_wrong = self.result.counts["steps"], len({f.where for f in self.result.faults})
        if num_steps:
            rate = max_error_rate(num_wrong, num_steps)
            self.result.bounds.append(f"wrong steps ≤ {rate:.2%} ({CONFIDENCE:.0%} confidence)")
        return self.result

    def _check_report(self, request: AuditRequest, answer: Answer, reported: ReportedSequence) -> None:
        """Check that the report belongs to this request and this answer, and has no gap."""
        name, result = request.name, self.result
        result.expect("prompt", name, self._reference.encode(request.prompt), reported.prompt)
        for key, value in requested_sampling(request.options).items():
            result.expect(f"sampling, {key}", name, value, getattr(reported.sampling, key))
        result.expect("output ids", name, list(answer.ids), reported.tokens[: len(answer.ids)])
        context = Context(reported.prompt)
        for number, step in enumerate(reported.steps):
            where = f"{name}, step {number}"
            result.expect("prefix_len", where, len(context), step.prefix_len)
            result.expect("context_hash", where, context.rolling_hash(len(context)), step.context_hash)
            context.commit(step.tokens)
        surplus = len(reported.tokens) - len(answer.ids)
        result.expect("last step reaches the end", name, True, 0 <= surplus < len(reported.steps[-1].tokens))

    def _check_step(self, where: str, step: ReportedStep, replay: Replay, sampling: Sampling) -> None:
        self.result.counts.update(
            steps=1, tokens=len(step.tokens), drafted=step.tree.num_nodes, accepted=len(step.accepted.path)
        )
        self.result.expect("a source per node", where, step.tree.num_nodes, len(step.sources))
        self._check_drafts(where, step, sampling)
        decision = replay.decide(step)
        if decision.accepted != step.accepted:
            expected, got = _sentence(decision.accepted), _sentence(step.accepted)
            self.result.add("decision", where, expected, got, near_tie=decision.is_tie)

    def _check_drafts(self, where: str, step: ReportedStep, sampling: Sampling) -> None:
        """Check that sampled drafts come from the reported q with the drafter's own noise."""
        if not step.q or not sampling.rule.uses_q:
            return
        for parent, siblings in enumerate(step.tree.children):
            if not siblings:
                continue
            q = step.q[next(iter(siblings.values())) - 1]
            if not is_sampled(step, parent, list(siblings), q, sampling):
                self.result.add("drafts sampled from q", where, f"a sample of {q.ids.tolist()}", str(list(siblings)))


def is_sampled(step: ReportedStep, parent: int, siblings: list[int], q: Distribution, sampling: Sampling) -> bool:
    """Return whether the children of a node are what the drafter's noise samples from their q, in this order.

    The noise of a node's children is keyed by the number that the drafter gave the node while the tree grew. The root's
    is 0; a report contains only the nodes that were kept, so below the root any number will do.
    """
    position = step.prefix_len + int(step.tree.depths[parent])
    numbers = np.arange(MAX_CANDIDATES if parent else 1)
    for first in range(0, len(numbers), NUMBERS_AT_ONCE):
        streams = Stream.DRAFT.of_node(numbers[first : first + NUMBERS_AT_ONCE, None])
        noise = gumbel(sampling.seed, position, q.ids[None], streams, step.prefix_len)
        order = np.argsort(-(log(q.probs) + noise), axis=-1, kind="stable")[:, : len(siblings)]
        if (q.ids[order] == siblings).all(axis=-1).any():
            return True
    return False


def requested_sampling(options: Options) -> dict[str, object]:
    """Return the fields of Sampling that a request sets, floats as an FP32 tensor carries them."""
    values: dict[str, object] = {name: float(np.float32(options[name])) for name in FLOATS if name in options}
    values |= {name: options[name] for name in ("top_k", "seed", "min_tokens") if name in options}
    return values | {"rule": rule_of(options)}


def rule_of(options: Options) -> Rule:
    """Return the acceptance rule of a request."""
    return Rule(options.get("rule") or Rule.COUPLED)


def _sentence(accepted: AcceptedPath) -> str:
    return f"path {list(accepted.path)} and token {accepted.next_token}"


class Replays:
    """One replay check per rule; `typical` is lossy, yet its steps must still be those of its own rule."""

    def __init__(self, reference: ReferenceModel) -> None:
        self._checks: dict[Rule, ReplayCheck] = {}
        self._reference = reference

    def check(self, request: AuditRequest, answer: Answer) -> None:
        """Replay one answer."""
        rule = rule_of(request.options)
        if rule not in self._checks:
            self._checks[rule] = ReplayCheck(self._reference, f"{REPLAY}, {RULE_NAMES.get(rule, rule)}")
        self._checks[rule].check(request, answer)

    def close(self) -> list[Result]:
        """Return the results by rule."""
        return [check.close() for check in self._checks.values()]
