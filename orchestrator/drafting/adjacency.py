"""The tokens that the target last found likeliest after each token: Token Recycling's adjacency matrix."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.core.arrays import IdArray

#: Tokens kept after each token, the paper's k.
NUM_FOLLOWERS = 8
#: Maximum size of all shared matrices of a process together; the least recently used one is dropped.
MAX_SHARED_BYTES = 64 << 20

Indices = npt.NDArray[np.intp]


class AdjacencyMatrix:
    """For each token of a vocabulary up to NUM_FOLLOWERS followers, the most probable first; any thread may call.

    Tokens are stored as id + 1, so that 0 is the unknown token, whose followers are unknown.
    Invariant: the followers of a token are distinct, and no known follower comes after an unknown one.
    Memory: 32 bytes per token of the vocabulary, allocated by the system as rows are written.
    Source: Token Recycling, Luo et al. 2024, arXiv:2408.08696, section 3.1.
    """

    def __init__(self, vocab_size: int) -> None:
        self._rows = np.zeros((vocab_size + 1, NUM_FOLLOWERS), np.int32)
        self._lock = threading.Lock()

    def learn(self, tokens: Indices, top_ids: IdArray) -> None:
        """Replace the rows of tokens; if a token occurs several times, its last row counts.

        tokens: (n,), each id + 1. top_ids: (n, k) ids, the most probable first, without the + 1.
        """
        width = min(top_ids.shape[1], NUM_FOLLOWERS)
        with self._lock:
            self._rows[tokens, :width] = top_ids[:, :width] + 1

    def learn_text(self, ids: Sequence[int]) -> None:
        """Replace the rows of a text's tokens by the tokens that followed them there, the most recent first."""
        followers: dict[int, dict[int, None]] = {}
        for token, follower in itertools.pairwise(ids):
            seen = followers.setdefault(token, {})  # dictionaries keep the order of entry
            seen.pop(follower, None)
            seen[follower] = None
        with self._lock:
            for token, seen in followers.items():
                kept = list(seen)[: -NUM_FOLLOWERS - 1 : -1]
                self._rows[token + 1] = 0
                self._rows[token + 1, : len(kept)] = np.array(kept, np.int32) + 1

    def followers(self, tokens: Indices, ranks: Indices) -> IdArray:
        """Return each token's follower at its rank, 0 where it is unknown; all (n,), tokens as id + 1."""
        with self._lock:
            found: IdArray = self._rows[tokens, ranks]
        return found

    def knows(self, tokens: Indices) -> npt.NDArray[np.bool_]:
        """Return for each token, as id + 1, whether it has any follower, (n,)."""
        return self.followers(tokens, np.zeros(len(tokens), np.intp)) > 0


class SharedMatrices:
    """One matrix for each cache salt; any thread may call.

    Invariant: a matrix holds only what was learnt from steps with its own salt. All matrices together take at most
    MAX_SHARED_BYTES, but one matrix is always kept.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_matrices = max(1, MAX_SHARED_BYTES // (4 * NUM_FOLLOWERS * (vocab_size + 1)))
        self._by_salt: OrderedDict[str, AdjacencyMatrix] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, salt: str) -> AdjacencyMatrix:
        """Return the matrix of a salt, which is empty if the salt is new."""
        with self._lock:
            matrix = self._by_salt.pop(salt, None) or AdjacencyMatrix(self._vocab_size)
            self._by_salt[salt] = matrix
            if len(self._by_salt) > self._max_matrices:
                self._by_salt.popitem(last=False)
            return matrix
