"""Tokens to text, step by step: never half a character, never a stop string, nothing behind a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tokenizers import Tokenizer

# Enough of the prompt to tell the decoder whether a leading space belongs to the first new token.
NUM_PRIMING_IDS = 6
MAX_CHARACTER_BYTES = 4
#: What the decoder shows for bytes that are no character, or not yet one.
TORN = "\ufffd"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class StopRule:
    """What ends a request: an id (EOS among them), a string, or the number of tokens."""

    max_tokens: int
    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


class Detokenizer:
    """Ids in, whole characters out.

    Law: the pieces that come out, joined, are the decoded text of all ids. One exception: with byte fallback,
    a broken byte turns its whole run of bytes into �; what is out by then stays.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0  # the text of the first ids is out; they stay as context of the others
        for token in _decodable_end(tokenizer, prompt):
            self.push(token)

    def push(self, token: int) -> str:
        """Return the characters that this token completes."""
        self._ids.append(token)
        piece = self._hidden()
        if not piece or piece.endswith(TORN):
            return ""
        del self._ids[: self._num_shown]
        self._num_shown = len(self._ids)
        return piece

    def flush(self) -> str:
        """Return what stays incomplete at the end, as the decoder shows it."""
        rest = self._hidden()
        self._num_shown = len(self._ids)
        return rest

    def _hidden(self) -> str:
        shown = self._tokenizer.decode(self._ids[: self._num_shown])
        text: str = self._tokenizer.decode(self._ids)
        return text[len(shown) :]


def _decodable_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> Sequence[int]:
    """Return the last few ids of a prompt, from the beginning of a character on where there is one."""
    sizes = range(NUM_PRIMING_IDS, NUM_PRIMING_IDS + MAX_CHARACTER_BYTES)
    ends = [list(prompt[-size:]) for size in sizes]
    return next((end for end in ends if not tokenizer.decode(end).startswith(TORN)), ends[0])


class StopFilter:
    """Text in, text out without the first stop string and all behind it.

    The first is the one that is complete first, and the longest of several that end together.
    Law: what came out so far never contains a stop string, nor a beginning of one that may yet complete;
    it does not depend on how the text was cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Return the text that is safe to show now."""
        self._held += piece
        found = [(at + len(s), at) for s in self._strings if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self._take(min(found)[1])
        return self._take(len(self._held) - self._possible_stop())

    def flush(self) -> str:
        """Return what was held back, once nothing can follow."""
        return "" if self.stopped else self._take(len(self._held))

    def _take(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0


@dataclass
class Chunk:
    """What one step adds to a response: deltas throughout."""

    text: str
    ids: list[int]
    logprobs: list[float]


class Output:
    """The text of one request as it grows; decides where in an accepted path it ends.

    Law: the tokens behind a stop are dropped, so that output and reason are those of one token at a time;
    a stop id counts as a token and gives no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], rule: StopRule) -> None:
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self._rule = rule
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._filter = StopFilter(rule.strings)

    def push(self, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> Chunk:
        """Take the tokens of one step up to the first that ends the request."""
        chunk = Chunk("", [], [])
        for index, token in enumerate(tokens):
            chunk.ids.append(token)
            chunk.logprobs += logprobs[index : index + 1]
            chunk.text += self._take(token)
            if self.finish:
                break
        return chunk

    def close(self, reason: FinishReason) -> str:
        """End the request from outside and return the text that was still held back."""
        self.finish = reason
        return self._flush()

    def _take(self, token: int) -> str:
        self.num_tokens += 1
        if token in self._rule.ids:
            return self.close(FinishReason.STOP)
        text = self._filter.push(self._detokenizer.push(token))
        if self._filter.stopped:
            self.finish = FinishReason.STOP
        elif self.num_tokens >= self._rule.max_tokens:
            text += self.close(FinishReason.LENGTH)
        return text

    def _flush(self) -> str:
        return self._filter.push(self._detokenizer.flush()) + self._filter.flush()
