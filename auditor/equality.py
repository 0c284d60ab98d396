"""Checks `greedy` and `invariance`: the text is that of transformers, and one seed gives one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from auditor.reference.distribution import sample
from auditor.reference_model import ReferenceModel, perturbed
from auditor.requests import Answer, AuditRequest, Options
from auditor.results import Result
from orchestrator.core.sampling_params import Sampling

#: The inputs of a request that are FP32 tensors and fields of Sampling.
FLOATS = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first position at which two outputs differ, None if they are equal."""
    for index, (left, right) in enumerate(zip(expected, got, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


class Comparison:
    """Compares the ids of answers with those expected.

    Only the first difference is judged, since the contexts differ after it: it is a near tie if rounding alone could
    have caused it, and a finding otherwise.
    """

    def __init__(self, name: str, reference: ReferenceModel) -> None:
        self.result = Result(name)
        self._reference = reference

    def compare(self, request: AuditRequest, expected: Sequence[int], answer: Answer) -> None:
        """Compare one answer; whether a difference is a near tie is decided in float64."""
        self.result.counts["requests"] += 1
        self.result.counts["tokens"] += len(answer.ids)
        at = first_difference(expected, answer.ids)
        if at is None:
            return
        left, right = (ids[at] if at < len(ids) else None for ids in (expected, answer.ids))
        is_tie = right is not None and self._is_tie(request, list(expected[:at]), right)
        self.result.add(self.result.check, f"{request.name}, output token {at}", left, right, is_tie)

    def _is_tie(self, request: AuditRequest, output: list[int], token: int) -> bool:
        """Return whether the target could pick `token` after `output` if rounding moved its logits."""
        ids, sampling = [*self._reference.encode(request.prompt), *output], sampling_of(request.options)
        variants = perturbed(self._reference.logits(ids), self._reference.rounding)
        return any(int(sample(logits, [len(ids)], sampling)[0]) == token for logits in variants)


def sampling_of(options: Options) -> Sampling:
    """Return the sampling of a request without penalties, bias, bad words or a grammar."""
    values: dict[str, Any] = {name: float(np.float32(options[name])) for name in FLOATS if name in options}
    return Sampling(**values, top_k=options.get("top_k", 0), seed=options.get("seed", 0))


class GreedyCheck(Comparison):
    """Compares the tokens of plain greedy requests with those of transformers' `generate`."""

    def __init__(self, reference: ReferenceModel) -> None:
        super().__init__("greedy", reference)
        self._outputs: dict[tuple[str, int], list[int]] = {}

    def check(self, request: AuditRequest, answer: Answer) -> None:
        """Compare one answer if its request is plain greedy decoding."""
        if not is_plain_greedy(request.options):
            return
        key = request.prompt, request.options["max_tokens"]
        if key not in self._outputs:
            self._outputs[key] = self._reference.greedy(self._reference.encode(request.prompt), key[1])
        self.compare(request, self._outputs[key], answer)


def is_plain_greedy(options: Options) -> bool:
    """Return whether a request decodes at temperature 0, with nothing that changes the logits or the end."""
    changing = {*FLOATS, "logit_bias_ids", "bad_words", "min_tokens", "guided_decoding_guide_type", "stop_words"}
    return not changing & options.keys() and not options.get("top_k", 0) > 1
