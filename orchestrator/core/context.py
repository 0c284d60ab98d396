"""The committed tokens of one request, and a name for every beginning of them."""

from __future__ import annotations

from collections.abc import Sequence

HASH_MULTIPLIER = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


class Context:
    """The committed tokens of one request, the last one the root; the loop only ever appends.

    `rolling_hash(n)` names the first n tokens, so that an engine can tell that it holds the same ones.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = list(prompt)
        self.prompt_len = len(self.ids)
        self._hashes = [0]

    def __len__(self) -> int:
        """Return prefix_len: prompt and output, the root included."""
        return len(self.ids)

    @property
    def root(self) -> int:
        """Id of the last committed token."""
        return self.ids[-1]

    @property
    def output(self) -> list[int]:
        """Ids committed since the prompt."""
        return self.ids[self.prompt_len :]

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens for good."""
        self.ids.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens (an engine's view may run ahead of the loop's)."""
        del self.ids[length:]
        del self._hashes[length + 1 :]

    def rolling_hash(self, length: int) -> int:
        """Return the 64-bit hash of the first `length` tokens, in O(tokens since the last call)."""
        for token in self.ids[len(self._hashes) - 1 : length]:
            self._hashes.append(extend_hash(self._hashes[-1], token))
        return self._hashes[length]


def extend_hash(value: int, token: int) -> int:
    """Return the rolling hash of a token sequence and one more token; the hash of none is 0."""
    return ((value + token + 1) * HASH_MULTIPLIER) & MASK64
