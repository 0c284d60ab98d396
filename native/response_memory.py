"""Earlier responses in C++, for the proposers that draft from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from ctypes import c_int32

import numpy as np

from native.drafts_library import drafts_library
from native.failures import check, counted, made
from native.freeing import freed_with

#: The maximum number of followers of a context that are looked up, over all texts of a salt.
MAX_REMEMBERED = 1024


class NativeMemory:
    """Earlier responses in native code; any thread may call. max_tokens: most tokens held, over all salts."""

    def __init__(self, max_tokens: int) -> None:
        self.library = library = drafts_library()
        self.handle = made(library.drafts_new_memory(max_tokens), "a memory of responses")
        freed_with(self, library.drafts_free_memory, self.handle)

    def of(self, salt: str) -> NativeRecollection:
        """Return the responses that a request with this salt may draft from."""
        return NativeRecollection(self, salt)

    def learn(self, salt: str, tokens: Sequence[int]) -> None:
        """Add a response; if it exceeds max_tokens, only its end."""
        recollection, new = self.of(salt), (c_int32 * len(tokens))(*tokens)
        check(self.library.drafts_remember(recollection.handle, new, len(tokens)), "a memory of responses")


class NativeRecollection:
    """The earlier responses that one request may draft from: those of its own salt."""

    def __init__(self, memory: NativeMemory, salt: str) -> None:
        self._memory, library, key = memory, memory.library, salt.encode(errors="surrogatepass")
        self.handle = made(library.drafts_new_recollection(memory.handle, key, len(key)), "a memory of responses")
        freed_with(self, library.drafts_free_recollection, self.handle)

    def followers(self, context: Sequence[int]) -> Counter[int]:
        """Return {token: how often it followed all of `context`}; at most MAX_REMEMBERED tokens."""
        backwards, found = (c_int32 * len(context))(*context[::-1]), np.empty((2, MAX_REMEMBERED), np.int32)
        written = (row.ctypes.data for row in found)
        look_up = self._memory.library.drafts_remembered
        size = counted(look_up(self.handle, backwards, len(context), *written, MAX_REMEMBERED), "a look-up")
        counts: Counter[int] = Counter()
        for token, times in found[:, :size].T.tolist():
            counts[token] += times
        return counts
