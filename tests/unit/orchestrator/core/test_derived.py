"""What is derived from an object is made once, and freed with it: a reload leaves no old tables in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from orchestrator.core.derived import derived_once
from orchestrator.drafting.candidates import likeliest_followers
from orchestrator.drafting.corpus import native_corpus
from orchestrator.drafting.native_growth import _native
from tests.unit.orchestrator.drafting.test_native_growth import corpus_of, tables_of, text_of


class Source:
    """Something to derive from."""


def test_it_is_derived_once_from_each_object() -> None:
    made = list[Source]()

    @derived_once
    def derive(source: Source) -> str:
        made.append(source)
        return f"of {len(made)}"

    sources = [Source() for _ in range(9)]
    assert [derive(source) for source in sources * 2] == [f"of {i + 1}" for i in range(9)] * 2
    assert made == sources


def _tables() -> object:
    return tables_of(np.random.default_rng(0))


def _corpus() -> object:
    rng = np.random.default_rng(0)
    return corpus_of(rng, text_of(rng, 200))


@pytest.mark.parametrize(
    ("make", "derive"), [(_tables, _native), (_tables, likeliest_followers), (_corpus, native_corpus)]
)
def test_tables_and_what_is_derived_from_them_are_freed_with_their_last_user(
    make: Callable[[], object], derive: Callable[[object], object]
) -> None:
    source = make()
    derived = derive(source)
    assert derive(source) is derived
    first = derived[0].keys if isinstance(derived, tuple) else derived
    left = weakref.ref(source), weakref.ref(first)
    del source, derived, first
    gc.collect()
    assert [each() for each in left] == [None, None]
