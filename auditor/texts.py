"""Checks `text` and `log-probs`: tokens decode to the text, cut at the stops; log-probabilities are the model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from auditor.reference.distribution import log_softmax
from auditor.reference_model import ReferenceModel
from auditor.requests import Answer, AuditRequest
from auditor.results import Result

TORN = "\ufffd"
#: Served dtype → tolerance of a log-probability: the public output is FP32, and rounding moves the logits.
TOLERANCES = {"float64": 1e-5, "float32": 1e-3, "bfloat16": 0.2}


def expected_text(reference: ReferenceModel, ids: Sequence[int], request: AuditRequest) -> tuple[str, str]:
    """Return the text of an output and its finish reason, decoded from the beginning for every token.

    Order of the reasons to stop: a stop id, the stop string that is complete first, max_tokens.
    Source: docs/stopping.md, without min_tokens.
    """
    words, ends = request.options.get("stop_words", []), stop_ids_of(reference, request)
    tokenizer, prompt = reference.tokenizer, reference.encode(request.prompt)
    start = len(tokenizer.decode(prompt))
    text = ""
    for number, token in enumerate(ids, start=1):
        if token in ends:
            return whole_or_cut(text, words), "stop"
        text = tokenizer.decode([*prompt, *ids[:number]])[start:]
        whole = text.rstrip(TORN)
        if (before := cut(whole, words)) is not None:
            return before, "stop"
    return whole_or_cut(text, words), "length"


def stop_ids_of(reference: ReferenceModel, request: AuditRequest) -> set[int]:
    """Return the ids that end an output: EOS unless the request ignores it, and the request's own."""
    eos_ids = set() if request.options.get("ignore_eos") else set(reference.checkpoint.eos_ids)
    return eos_ids | set(request.options.get("stop_ids", []))


def whole_or_cut(text: str, words: Sequence[str]) -> str:
    """Return the text before its first stop string, the whole text without one."""
    before = cut(text, words)
    return text if before is None else before


def cut(text: str, words: Sequence[str]) -> str | None:
    """Return the text before the stop string that is complete first (the longest if several are); None without one."""
    found = [(at + len(word), at) for word in words if (at := text.find(word)) >= 0]
    return text[: min(found)[1]] if found else None


class TextCheck:
    """Checks texts and log-probabilities, answer by answer."""

    def __init__(self, reference: ReferenceModel) -> None:
        self.text, self.logprobs = Result("text"), Result("log-probs")
        self._reference = reference
        self._worst = 0.0

    def check(self, request: AuditRequest, answer: Answer) -> None:
        """Check one answer."""
        self._check_text(request, answer)
        if request.options.get("return_log_probs"):
            self._check_logprobs(request, answer)

    def close(self) -> list[Result]:
        """Return both results."""
        if self.logprobs.counts["tokens"]:
            self.logprobs.bounds.append(f"worst {self._worst:.1e}")
        return [self.text, self.logprobs]

    def _check_text(self, request: AuditRequest, answer: Answer) -> None:
        name, (text, reason) = request.name, expected_text(self._reference, answer.ids, request)
        self.text.expect("text", name, text, answer.text)
        self.text.expect("finish_reason", name, reason, answer.finish_reason)
        for word, chunk in leaks(answer.chunks, request.options.get("stop_words", [])):
            self.text.add("stop string", f"{name}, chunk {chunk}", f"no {word!r}", answer.chunks[chunk])
        self.text.counts.update(requests=1, tokens=len(answer.ids), chunks=len(answer.chunks))
        self.text.counts["stopped"] += reason == "stop"

    def _check_logprobs(self, request: AuditRequest, answer: Answer) -> None:
        ids = list(answer.ids)
        rows = self._reference.logits([*self._reference.encode(request.prompt), *ids], len(ids) + 1)[:-1]
        expected = log_softmax(rows)[np.arange(len(ids)), ids]
        self.logprobs.counts.update(requests=1, tokens=len(ids))
        if not self.logprobs.expect("count", request.name, len(ids), len(answer.logprobs)):
            return
        gaps = np.abs(expected - np.array(answer.logprobs))
        self._worst = max(self._worst, float(gaps.max(initial=0.0)))
        for at in np.flatnonzero(~(gaps <= TOLERANCES[self._reference.dtype])).tolist()[:1]:
            self.logprobs.add("log-prob", f"{request.name}, token {at}", expected[at], answer.logprobs[at])


def leaks(chunks: Sequence[str], words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield every stop string that was streamed, in one chunk or across several, and the chunk that completes it."""
    for word in words:
        shown = ""
        for number, chunk in enumerate(chunks):
            before, shown = shown, shown + chunk
            if word in shown and word not in before:
                yield word, number
