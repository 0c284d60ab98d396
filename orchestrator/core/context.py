"""The committed tokens of one request, and a hash of each of their prefixes."""

from __future__ import annotations

from collections.abc import Sequence

HASH_MULTIPLIER = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


class Context:
    """The committed tokens of one request; the last one is the root. The generation loop only appends.

    ids: all token ids. prompt_len: how many of them are the prompt.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = list(prompt)
        self.prompt_len = len(self.ids)
        self._hashes = [0]

    def __len__(self) -> int:
        """Return prefix_len: the number of tokens of prompt and output, root included."""
        return len(self.ids)

    @property
    def root(self) -> int:
        """Id of the last committed token."""
        return self.ids[-1]

    @property
    def output(self) -> list[int]:
        """Ids committed after the prompt."""
        return self.ids[self.prompt_len :]

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.ids.extend(tokens)

    def truncate(self, length: int) -> None:
        """Drop all but the first `length` tokens; for an engine's copy, which may be ahead of the loop's context."""
        del self.ids[length:]
        del self._hashes[length + 1 :]

    def rolling_hash(self, length: int) -> int:
        """Return the 64-bit hash of the first `length` tokens, by which an engine recognises the tokens that it holds.

        h(∅) = 0, h(x·t) = (h(x) + t + 1) · HASH_MULTIPLIER mod 2⁶⁴. Only tokens after the longest prefix hashed so far
        are visited.
        """
        for token in self.ids[len(self._hashes) - 1 : length]:
            self._hashes.append(((self._hashes[-1] + token + 1) * HASH_MULTIPLIER) & MASK64)
        return self._hashes[length]
