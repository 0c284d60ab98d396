"""Turns tokens into text step by step; never shows half a character, a stop string, or anything after a stop."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache

from tokenizers import Tokenizer, pre_tokenizers

# The last ids of the prompt tell the decoder whether the first new token begins with a space.
NUM_PRIMING_IDS = 6
MAX_CHARACTER_BYTES = 4
#: Maximum ids whose text is held back; limited because all of them are decoded again with each new id.
MAX_HELD_IDS = 64
#: The decoder's replacement for bytes that form no character, or an incomplete one.
REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class StopRule:
    """What ends a request: an id (EOS is one), a string, or the number of tokens; docs/stopping.md has every case.

    Invariant: an id or a string ends it only at a token after the first min_tokens; max_tokens always ends it.
    """

    max_tokens: int
    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    min_tokens: int = 0


class Detokenizer:
    """Turns ids into whole characters.

    Invariant: the returned pieces, joined, are the decoded text of all ids. One exception: with byte fallback, a broken
    byte turns its whole run of bytes into �, but pieces that have already been returned stay as they are, including
    those that were returned because more than MAX_HELD_IDS ids were held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0  # the text of the first `_num_shown` ids has been returned; they are context for the rest
        self._num_skipped = 0  # characters of the prompt before the first that is returned
        end = _decodable_end(tokenizer, prompt)
        num_torn = _num_torn(tokenizer, end)
        for token in end[: len(end) - num_torn]:
            self.push(token)
        self.flush()
        for token in end[len(end) - num_torn :]:
            self.push(token)
        if num_torn and _is_byte_level(tokenizer):  # where a token may end one character and begin another
            self._num_skipped = max(len(self._hidden()) - 1, 0)

    def push(self, token: int) -> str:
        """Return the characters that this token completes."""
        self._ids.append(token)
        piece = self._hidden()
        if piece and not piece.endswith(REPLACEMENT):
            return self._shown(piece, len(self._ids))
        if len(self._ids) - self._num_shown <= MAX_HELD_IDS:
            return ""
        end = self._end_of_character()
        return self._shown(self._hidden(end), end)

    def flush(self) -> str:
        """Return the incomplete character at the end, as the decoder shows it."""
        rest = self._hidden()
        self._num_shown = len(self._ids)
        return rest

    def _hidden(self, end: int | None = None) -> str:
        """Return the text of the ids before `end` (by default all ids) that has not been returned yet."""
        shown = self._tokenizer.decode(self._ids[: self._num_shown])
        text: str = self._tokenizer.decode(self._ids[:end])
        return text[len(shown) + self._num_skipped :]

    def _shown(self, piece: str, end: int) -> str:
        """Return a piece, and make its ids, which end before `end`, the context of the ids from `end` on."""
        if piece:
            self._num_skipped = 0
            del self._ids[: self._num_shown]
            self._num_shown = end - self._num_shown
        else:  # special tokens, which do not serve as context
            del self._ids[self._num_shown : end]
        return piece

    def _end_of_character(self) -> int:
        """Return the index of the first of the newest ids that may belong to an incomplete character."""
        decode, ids = self._tokenizer.decode, self._ids
        ends = [len(ids) - MAX_CHARACTER_BYTES - number for number in range(MAX_CHARACTER_BYTES)]
        whole = decode(ids)
        return next((end for end in ends if decode(ids[:end]) + decode(ids[end:]) == whole), ends[0])


def _decodable_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> Sequence[int]:
    """Return the last few ids of a prompt, starting at the beginning of a character if possible."""
    sizes = range(NUM_PRIMING_IDS, NUM_PRIMING_IDS + MAX_CHARACTER_BYTES)
    ends = [list(prompt[-size:]) for size in sizes]
    return next((end for end in ends if not tokenizer.decode(end).startswith(REPLACEMENT)), ends[0])


def _num_torn(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Return how many of the last ids hold the bytes of an incomplete character; a prompt's own � is complete."""
    for number in range(1, min(MAX_CHARACTER_BYTES, len(ids) + 1)):
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(_token_bytes(tokenizer, token) for token in ids[-number:]))
        if decoder.getstate()[0]:
            return number
    return 0


def _token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token as far as they can be parts of characters; any other character is a `?`."""
    piece = tokenizer.id_to_token(token) or ""
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(match[1], 16)])
    table = _byte_characters() if _is_byte_level(tokenizer) else {}
    return bytes(table.get(character, ord("?")) for character in piece)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in str(tokenizer.decoder)


@cache
def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE stands for, as the library maps them."""
    # Every byte that UTF-8 has is in one of these characters; those that it lacks stand for themselves.
    text = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    known = dict(zip("".join(piece for piece, _ in pieces), text.encode(), strict=True))
    return {character: known.get(character, ord(character)) for character in pre_tokenizers.ByteLevel.alphabet()}


class StopFilter:
    """Passes text on up to the first stop string that counts.

    A stop string counts if its last character came in a piece with `may_stop`. Otherwise it is ordinary text, and may
    be part of a stop string that ends later. The first stop string is the one that ends first, and the longest if
    several end together.
    Invariant: the returned text has no stop string that counts, nor the beginning of one that may still be completed.
    It depends on which characters came with `may_stop`, but not on how the text was cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self.has_stopped = False

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Return the text that is safe to show now; must not be called again once `has_stopped`."""
        start = self._first_stop(piece) if may_stop else None
        self._held += piece
        if start is None:
            return self._take(len(self._held) - self._possible_stop())
        self.has_stopped = True
        shown, self._held = self._held[:start], ""
        return shown

    def flush(self) -> str:
        """Return the text that was held back; no call may follow."""
        return self._take(len(self._held))

    def _take(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown

    def _first_stop(self, piece: str) -> int | None:
        """Return the index, in held text + piece, at which the first stop string that ends in the piece begins."""
        text, num_held = self._held + piece, len(self._held)
        found = [(at + len(s), at) for s in self._strings if (at := text.find(s, max(num_held + 1 - len(s), 0))) >= 0]
        return min(found)[1] if found else None

    def _possible_stop(self) -> int:
        """Return the length of the longest suffix of the held text that is the beginning of a stop string."""
        longest = max((len(s) for s in self._strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0


@dataclass
class Chunk:
    """What one or several steps add to a response. top_ids, top_logprobs: the most probable tokens of each position."""

    text: str
    ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    def extend(self, other: Chunk) -> None:
        """Append what a later step adds."""
        self.text += other.text
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.top_ids += other.top_ids
        self.top_logprobs += other.top_logprobs


class Output:
    """The growing text of one sequence; it decides where in an accepted path the sequence ends.

    If several reasons apply at one token, the order is stop id, stop string, max_tokens; a deadline or a cancellation
    comes only between steps. The first reason stands: text that is released at the end is also cut at a stop string,
    but this does not change the reason.
    Invariant: tokens after a stop are dropped, so that output and reason are the same as when decoding one token at a
    time. A stop id that ends the sequence counts as a token and has no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], rule: StopRule) -> None:
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self._rule = rule
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._filter = StopFilter(rule.strings)

    def push(self, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> Chunk:
        """Add the tokens of one step, up to the first that ends the sequence."""
        chunk = Chunk("", [], [])
        for index, token in enumerate(tokens):
            if self.finish:
                break
            chunk.ids.append(token)
            chunk.logprobs += logprobs[index : index + 1]
            chunk.text += self._take(token)
        return chunk

    def close(self, reason: FinishReason) -> str:
        """End the sequence, unless it has already ended, and return the text that was held back."""
        if self.finish:
            return ""
        self.finish = reason
        return self._show(self._detokenizer.flush()) + self._filter.flush()

    def _take(self, token: int) -> str:
        self.num_tokens += 1
        if token in self._rule.ids and self._may_stop():
            return self.close(FinishReason.STOP)
        text = self._show(self._detokenizer.push(token))
        if self._filter.has_stopped:
            self.finish = FinishReason.STOP
        elif self.num_tokens >= self._rule.max_tokens:
            text += self.close(FinishReason.LENGTH)
        return text

    def _show(self, piece: str) -> str:
        return self._filter.push(piece, self._may_stop())

    def _may_stop(self) -> bool:
        """Return True if the newest token, or a character that it completes, may end the sequence."""
        return self.num_tokens > self._rule.min_tokens
