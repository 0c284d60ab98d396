"""Checks `greedy` and `invariance`: the text is transformers' own, and one seed has one text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from auditor.reference_model import ReferenceModel, nudged
from auditor.replay import FLOATS
from auditor.requests import Answer, AuditRequest, Options
from auditor.results import Result
from orchestrator.core.sampling_params import Sampling
from orchestrator.sampling.distribution import sample


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first position in which two outputs differ, None when they are the same."""
    for index, (left, right) in enumerate(zip(expected, got, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


class Comparison:
    """Compares outputs that must be the same; up to the first near tie, beyond which two texts go their own ways."""

    def __init__(self, name: str, reference: ReferenceModel) -> None:
        self.result = Result(name)
        self._reference = reference

    def compare(self, request: AuditRequest, expected: Sequence[int], answer: Answer) -> None:
        """Take in an answer; a difference is looked at in float64."""
        self.result.counts["requests"] += 1
        self.result.counts["tokens"] += len(answer.ids)
        at = first_difference(expected, answer.ids)
        if at is None:
            return
        due, got = (ids[at] if at < len(ids) else None for ids in (expected, answer.ids))
        is_tie = got is not None and self._is_tie(request, list(expected[:at]), got)
        self.result.note(self.result.check, f"{request.name}, output token {at}", due, got, is_tie)

    def _is_tie(self, request: AuditRequest, said: list[int], got: int) -> bool:
        """Would `got` come if logits moved as rounding may move them?"""
        if not self._reference.near_tie:
            return False
        ids, sampling = [*self._reference.encode(request.prompt), *said], sampling_of(request.options)
        moved = nudged(self._reference.rows(ids), self._reference.near_tie)
        return any(int(sample(rows, [len(ids)], sampling)[0]) == got for rows in moved)


def sampling_of(options: Options) -> Sampling:
    """Return the sampling of a request without edits."""
    numbers = {name: float(np.float32(options[name])) for name in FLOATS if name in options}
    return Sampling(**numbers, top_k=options.get("top_k", 0), seed=options.get("seed", 0))


class GreedyCheck(Comparison):
    """At temperature 0 under `coupled`, without edits: the tokens are those of `generate`."""

    def __init__(self, reference: ReferenceModel) -> None:
        super().__init__("greedy", reference)
        self._said: dict[tuple[str, int], list[int]] = {}

    def look(self, request: AuditRequest, answer: Answer) -> None:
        """Compare one answer; others than plain greedy ones are none of its business."""
        if not is_plain_greedy(request.options):
            return
        key = request.prompt, request.options["max_tokens"]
        if key not in self._said:
            self._said[key] = self._reference.greedy(self._reference.encode(request.prompt), key[1])
        self.compare(request, self._said[key], answer)


def is_plain_greedy(options: Options) -> bool:
    """True when temperature 0 is all that is asked of the sampling."""
    changing = {*FLOATS, "logit_bias_ids", "bad_words", "min_tokens", "guided_decoding_guide_type", "stop_words"}
    return not changing & options.keys() and not options.get("top_k", 0) > 1
