"""Native objects are freed on another thread, in their order, and without Python's global lock."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest

from native.drafts import NativeEstimates
from native.drafts_library import PromptLookupOptions, drafts_library
from native.freeing import freed_with
from tests.support.hanging import WAIT_S


class Owner:
    """Owns a native object."""


def test_an_owner_does_not_wait_until_its_object_is_freed_and_the_order_is_kept() -> None:
    let_go, done, freed = threading.Event(), threading.Event(), list[tuple[int, str]]()

    def free(handle: int) -> None:
        assert let_go.wait(WAIT_S)
        freed.append((handle, threading.current_thread().name))
        if handle == 2:
            done.set()

    for handle in range(3):
        owner = Owner()
        freed_with(owner, free, handle)
        del owner
        gc.collect()
    assert not freed
    let_go.set()
    assert done.wait(WAIT_S)
    assert freed == [(handle, "freeing") for handle in range(3)]


@pytest.mark.parametrize(
    "name", ["drafts_free", "drafts_free_estimates", "drafts_free_memory", "drafts_free_recollection"]
)
def test_freeing_lets_other_threads_run(name: str) -> None:
    library = drafts_library()
    assert library
    keeps_lock = ctypes.PyDLL._func_flags_ & ~ctypes.CDLL._func_flags_
    assert keeps_lock and not getattr(library, name)._flags_ & keeps_lock
    assert library.drafts_next._flags_ & keeps_lock, "the calls of each step keep it"


def test_a_proposer_is_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from native.drafts import native_prompt_lookup

    library, freed, done = drafts_library(), list[int](), threading.Event()
    assert library and NativeEstimates()
    free = library.drafts_free

    def counted(handle: int) -> None:
        free(handle)
        freed.append(handle)
        done.set()

    monkeypatch.setattr(library, "drafts_free", counted)
    proposer = native_prompt_lookup(PromptLookupOptions(3, 4, 1, 1, 0, 0))
    assert proposer
    handle = proposer.handle
    proposer.next(list(range(100)), 4, 4)
    del proposer
    assert done.wait(WAIT_S) and freed == [handle]
