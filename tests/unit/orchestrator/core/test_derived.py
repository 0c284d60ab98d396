"""What is derived from an object is made once, and freed with it: a reload leaves no old tables in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from orchestrator.core.derived import derived_once
from orchestrator.drafting.corpus import native_corpus
from orchestrator.drafting.tables import native_tables
from tests.support.counted import tables_of
from tests.unit.orchestrator.drafting.test_corpus import corpus_of
from tests.unit.orchestrator.drafting.test_ngram import COUNTED, VOCAB_SIZE


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
    return tables_of(COUNTED, VOCAB_SIZE)


def _corpus() -> object:
    return corpus_of([[1, 2, 3]])


@pytest.mark.parametrize(("make", "derive"), [(_tables, native_tables), (_corpus, native_corpus)])
def test_tables_and_what_is_derived_from_them_are_freed_with_their_last_user(
    make: Callable[[], object], derive: Callable[[object], object]
) -> None:
    source = make()
    derived = derive(source)
    assert derive(source) is derived
    left = weakref.ref(source), weakref.ref(derived)
    del source, derived
    gc.collect()
    assert [each() for each in left] == [None, None]
