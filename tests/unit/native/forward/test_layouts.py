"""The structures that Python and C++ both declare; a field that one side alone adds would shift the others."""

from __future__ import annotations

import ctypes

import pytest

from native import chains, drafts_library, head_fields, library, ranking, sampling
from native.compiling import Unbuilt
from runtime.models.native import decoding, drafters

STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "Shape": library.Shape,
    "SegmentPass": library.PassArrays,
    "Ranking": ranking.RankingFields,
    "DraftCall": head_fields.DraftCallFields,
    "Drafting": head_fields.DraftingFields,
    "Chain": chains.ChainFields,
    "Chains": chains.ChainsFields,
    "Member": decoding.MemberFields,
    "Continuation": decoding.ContinuationFields,
    "Decoding": decoding.DecodingFields,
    "Drafter": drafters.DrafterFields,
    "DrafterUse": drafters.DrafterUseFields,
    "Tree": drafts_library.TreeFields,
    "Request": sampling.Request,
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_both_declarations_have_one_size(name: str) -> None:
    try:
        native_size_of = library.load().native_size_of
    except Unbuilt as error:
        pytest.skip(str(error))
    native_size_of.argtypes, native_size_of.restype = [ctypes.c_char_p], ctypes.c_size_t
    assert native_size_of(name.encode()) == ctypes.sizeof(STRUCTURES[name])
