"""The shapes of OpenAI's responses: completions and chats, whole or streamed, with the statistics of speculation."""

from __future__ import annotations

import codecs
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.generation import Delta
from gateway.tokenizer import Checkpoint
from gateway.tool_calls import CallParser, ToolUse

#: Why a text ended, in OpenAI's words; a text ended by its deadline is incomplete, like one that reached its limit.
FINISH_REASONS = {"stop": "stop", "length": "length", "deadline": "length"}


@dataclass
class Format:
    """Builds the responses to one completion request.

    num_top: how many of the most probable tokens each position shows; None = without log-probabilities.
    has_token_ids, has_steps: choices have the ids of their tokens, and the steps with their draft trees.
    has_prediction: the request has a prediction of its output, whose tokens are the drafts.
    tool_use: how a chat's tools are used; None = it has none.
    """

    checkpoint: Checkpoint
    seed: int
    num_top: int | None = None
    has_token_ids: bool = False
    has_steps: bool = False
    has_prediction: bool = False
    tool_use: ToolUse | None = None
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._parsers: dict[int, CallParser] = {}
        # Per choice, for text_offset: a character may begin in one token, or chunk, and end in the next.
        self._num_characters: Counter[int] = Counter()
        self._decoders: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
        )

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a chunk of a stream."""
        return self._envelope(self.chunk_object) | {"choices": list(choices)} | more

    def response(self, sequences: Sequence[Delta], n: int) -> dict[str, Any]:
        """Return the whole response. n: choices of each prompt."""
        choices = [self.choice(index, sequence) for index, sequence in enumerate(sequences)]
        return self._envelope(self.object) | {"choices": choices} | self.totals(sequences, n)

    def choice(self, index: int, sequence: Delta) -> dict[str, Any]:
        """Return a whole choice."""
        return self.delta_choice(index, sequence)

    def delta_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return what a chunk adds to a choice."""
        return {"index": index, "text": delta.text, **self._rest(index, delta)}

    def totals(self, sequences: Sequence[Delta], n: int) -> dict[str, Any]:
        """Return usage, and the statistics of speculation in the shape that vLLM and AIPerf share."""
        counts = usage(sequences, n, sequences if self.has_prediction else ())
        return {"usage": counts, "metrics": {"speculative_decoding": speculation_metrics(sequences)}}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.checkpoint.name,
            "system_fingerprint": None,
            "seed": self.seed,
        }

    def _rest(self, index: int, delta: Delta) -> dict[str, Any]:
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self.num_top is not None and delta.ids:
            rest["logprobs"] = self.logprobs(index, delta)
        if delta.finish_reason:
            rest["finish_reason"] = FINISH_REASONS[delta.finish_reason]
            if delta.finish_reason == "deadline":
                rest["stop_reason"] = "deadline"
        if self.has_token_ids:
            rest["token_ids"] = delta.ids
        if self.has_steps:
            rest["steps"] = [self._step(step) for step in delta.steps]
        return rest

    def _step(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """Return one step, for display: the draft tree with the text of its nodes, and what was accepted."""
        parents, sources = step["node_parents"], step["sources"]
        nodes = [
            {"id": token, "text": self.checkpoint.token_name(token), "parent": parent, "source": source}
            for token, parent, source in zip(step["node_ids"], parents, sources, strict=True)
        ]
        ids = [*(step["node_ids"][node - 1] for node in step["path"]), *step["extra"], step["next_token"]]
        tokens = [{"id": token, "text": self.checkpoint.token_name(token)} for token in ids]
        return {"position": step["prefix_len"], "nodes": nodes, "path": step["path"], "tokens": tokens}

    def logprobs(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the log-probabilities of a delta."""
        tokens = [self.checkpoint.token_name(token) for token in delta.ids]
        offsets = [self._offset(index, token) for token in delta.ids]
        return {
            "tokens": tokens,
            "token_logprobs": delta.logprobs,
            "top_logprobs": [
                dict(zip(self.checkpoint.token_names(ids), values, strict=True))
                for ids, values in zip(delta.top_ids, delta.top_logprobs, strict=True)
            ]
            or None,
            "text_offset": offsets,
        }

    def _offset(self, index: int, token: int) -> int:
        """Return how many characters of a choice were complete before its next token, `token`."""
        before = self._num_characters[index]
        if token not in self.checkpoint.special_ids:
            text = self._decoders[index].decode(self.checkpoint.token_bytes(token))
            self._num_characters[index] += len(text)
        return before


class ChatFormat(Format):
    """Builds the responses to one chat request."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, sequence: Delta) -> dict[str, Any]:
        """Return a whole choice."""
        message: dict[str, Any] = {"role": "assistant", "content": sequence.text, "refusal": None}
        rest = self._rest(index, sequence)
        if self.tool_use:
            parsed = self._parsed(index, sequence, rest)
            calls = [{key: call[key] for key in ("id", "type", "function")} for call in parsed.get("tool_calls", [])]
            message["content"] = parsed.get("content", None if calls else "")
            message |= {"tool_calls": calls} if calls else {}
        return {"index": index, "message": message, **rest}

    def _parsed(self, index: int, delta: Delta, rest: dict[str, Any]) -> dict[str, Any]:
        """Return the content and the calls that a delta adds; a text that ends with a call says so in `rest`."""
        assert self.tool_use
        parser = self._parsers.setdefault(index, self.tool_use.parser())
        parsed = parser.push(delta.text, bool(delta.finish_reason))
        if parser.num_calls and rest["finish_reason"] == "stop":
            rest["finish_reason"] = "tool_calls"
        return parsed

    def first_choice(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a choice, which names the role."""
        delta = {"role": "assistant", "content": None if self.tool_use else "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return what a chunk adds to a choice."""
        rest = self._rest(index, delta)
        if self.tool_use:
            return {"index": index, "delta": self._parsed(index, delta, rest), **rest}
        return {"index": index, "delta": {"content": delta.text} if delta.text else {}, **rest}

    def logprobs(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the log-probabilities of a delta."""
        content = []
        for row, (token, logprob) in enumerate(zip(delta.ids, delta.logprobs, strict=True)):
            ids, values = (delta.top_ids[row], delta.top_logprobs[row]) if delta.top_ids else ([], [])
            top = [self._logprob(other, value) for other, value in zip(ids, values, strict=True)]
            content.append(self._logprob(token, logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        raw = list(self.checkpoint.token_bytes(token))
        return {"token": self.checkpoint.token_name(token), "logprob": logprob, "bytes": raw}


def token_counts(sequences: Sequence[Delta], n: int) -> dict[str, int]:
    """Return the tokens of a request's prompts, each counted once however many choices it has, and of its output."""
    prompt = sum(sequence.num_input_tokens for sequence in sequences[::n])
    completion = sum(len(sequence.ids) for sequence in sequences)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage(sequences: Sequence[Delta], n: int, predicted: Sequence[Delta] = ()) -> dict[str, Any]:
    """Return the token counts of a request, and their details.

    predicted: the sequences whose drafts are the tokens of the client's prediction; OpenAI's counts are of no others.
    """
    accepted = sum(sum(sequence.accepted) for sequence in predicted)
    drafted = sum(sum(sequence.drafted) for sequence in predicted)
    return {
        **token_counts(sequences, n),
        "prompt_tokens_details": {"cached_tokens": sum(s.num_cached_tokens for s in sequences[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def speculation_metrics(sequences: Sequence[Delta]) -> dict[str, Any]:
    """Return the statistics of a request's drafts.

    mean_acceptance_length = 1 + accepted draft tokens ÷ steps. acceptance_histogram[k]: steps that accepted k drafts.
    """
    accepted = [number for sequence in sequences for number in sequence.accepted]
    num_drafted = sum(sum(sequence.drafted) for sequence in sequences)
    counts = Counter(accepted)
    return {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
        "draft_acceptance_rate": sum(accepted) / max(num_drafted, 1),
        "acceptance_histogram": [counts[number] for number in range(max(accepted, default=0) + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": num_drafted,
    }
