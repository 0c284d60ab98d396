"""The structures of a call that runs a burst (decode.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_void_p
from typing import NamedTuple

import numpy as np

from native.sampling import Requests
from orchestrator.core.arrays import IdArray
from orchestrator.core.proposal import NativeDrafts
from orchestrator.core.tree import TokenTree
from runtime.engine.kv.batch import MAX_PASS_ROWS, MAX_TREE_NODES
from runtime.engine.kv.groups import STEP_TOKENS
from runtime.models.native.drafters import DrafterFields, DrafterUseFields, NativeUses

#: Maximum memory of a pass's logits, unless the first trees need more.
MAX_LOGITS_BYTES = 256 << 20


class MemberFields(Structure):
    """A method that drafts for a sequence, as `native::Member`."""

    _fields_ = [("proposer", c_void_p), ("max_nodes", c_int32)]


class ContinuationFields(Structure):
    """How a sequence continues, as `native::Continuation`."""

    _fields_ = [
        ("members", c_void_p),
        ("use", DrafterUseFields),
        ("stop_ids", c_void_p),
        *((name, c_int32) for name in (
            "num_members", "num_stop_ids", "min_tokens", "max_tokens", "max_nodes", "max_depth",
        )),
    ]  # fmt: skip


class DecodingFields(Structure):
    """Up to num_steps steps for every segment, as `native::Decoding`; the arrays must outlive the call."""

    _fields_ = [
        *((name, c_int32) for name in ("num_steps", "limit_us", "max_logits")),
        *((name, c_void_p) for name in ("interrupt", "requests")),
        *((name, c_void_p) for name in (
            "continuations", "drafters", "num_threads", "first_threads", "path_lens", "next_tokens", "num_nodes",
            "is_over", "num_read", "node_tokens", "node_parents", "node_names", "paths", "figures",
        )),
        ("num_drafters", c_int32),
        ("num_made", c_int32),
    ]  # fmt: skip


class Continuation(NamedTuple):
    """How a sequence continues after the step that was requested.

    It ends after max_tokens tokens, or with one of stop_ids after the first min_tokens tokens. drafts: what makes its
    trees; None = its steps are plain.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    drafts: NativeDrafts | None = None


class Decoding(NamedTuple):
    """What a burst needs besides its segments.

    requests: (segments,), how each sequence is sampled; their rule is `coupled`. sequences: (segments,), how each
    continues. num_steps: maximum steps. limit_s: no step begins after this time. interrupt: no step begins once it is
    not 0; any thread may set it. drafters: the heads and draft models of the sequences that use one.
    """

    requests: Requests
    sequences: Sequence[Continuation]
    num_steps: int
    limit_s: float
    interrupt: ctypes.c_int32
    drafters: NativeUses = NativeUses()


class Decoded(NamedTuple):
    """The steps that have run, by step and segment.

    path_lens, next_tokens, num_nodes: (steps, segments). num_nodes: the size of the tree after each step; the trees'
    node_tokens, node_parents and node_names follow one another. is_over: (segments,), not 0 for a sequence that has
    ended, or has no slots left for its next tree or draft. num_read: (segments,), how many tokens each sequence's
    drafter has read. paths: the accepted nodes of all steps. figures: (steps, 4), for each pass: µs of the pass, of its
    verification, and of the drafts after it; its threads.
    """

    path_lens: IdArray
    next_tokens: IdArray
    num_nodes: IdArray
    is_over: IdArray
    num_read: IdArray
    node_tokens: IdArray
    node_parents: IdArray
    node_names: IdArray
    paths: IdArray
    figures: IdArray


class DecodingCall:
    """The arguments of a call, and the memory that it writes to.

    num_first: nodes of the first pass. num_threads, first_threads: threads of a pass, by the bit length of its number
    of rows; first_threads: for the first pass of that length.
    """

    def __init__(
        self,
        decoding: Decoding,
        num_first: int,
        vocab_size: int,
        num_threads: Sequence[int],
        first_threads: Sequence[int],
    ) -> None:
        sequences, steps = decoding.sequences, decoding.num_steps
        max_nodes, count = _max_nodes(sequences, vocab_size), len(sequences)
        nodes = steps * sum(max_nodes)
        self._by_segment, self._at_end = np.empty((3, steps, count), np.int32), np.empty((2, count), np.int32)
        self._by_node = np.empty((3, nodes + 1), np.int32)
        self._paths, self._figures = np.empty(num_first + nodes + 1, np.int32), np.empty((steps, 4), np.int32)
        self._threads = [(c_int32 * len(threads))(*threads) for threads in (num_threads, first_threads)]
        self._stop_ids = [(c_int32 * len(each.stop_ids))(*each.stop_ids) for each in sequences]
        self._members = [_members_of(each) for each in sequences]
        self._decoding, self._fields = decoding, (ContinuationFields * count)()
        drafters = [drafter.fields for drafter in decoding.drafters.drafters]
        self._drafters = (DrafterFields * len(drafters))(*drafters)
        for place, (fields, each, stop_ids, members, most) in enumerate(
            zip(self._fields, sequences, self._stop_ids, self._members, max_nodes, strict=True)
        ):
            fields.use = decoding.drafters.fields_of(place)
            fields.members, fields.num_members = ctypes.addressof(members), len(members)
            fields.stop_ids, fields.num_stop_ids = ctypes.addressof(stop_ids), len(stop_ids)
            fields.min_tokens, fields.max_tokens = each.min_tokens, each.max_tokens
            if drafts := each.drafts:
                fields.max_nodes, fields.max_depth = most, drafts.max_depth
        self.max_logits = count + max(sum(max_nodes), num_first)
        self.fields = DecodingFields(
            steps,
            int(1e6 * decoding.limit_s),
            self.max_logits,
            ctypes.addressof(decoding.interrupt),
            ctypes.addressof(decoding.requests),
            ctypes.addressof(self._fields),
            ctypes.addressof(self._drafters) if drafters else None,
            *(ctypes.addressof(threads) for threads in self._threads),
            *(each.ctypes.data for each in (*self._by_segment, *self._at_end, *self._by_node)),
            *(each.ctypes.data for each in (self._paths, self._figures)),
            len(drafters),
        )

    @property
    def decoded(self) -> Decoded:
        """The steps that have run."""
        num_steps = self.fields.num_made
        path_lens, next_tokens, num_nodes = self._by_segment[:, :num_steps]
        tokens, parents, names = self._by_node[:, : num_nodes.sum()]
        paths, figures = self._paths[: path_lens.sum()], self._figures[:num_steps]
        is_over, num_read = self._at_end
        return Decoded(path_lens, next_tokens, num_nodes, is_over, num_read, tokens, parents, names, paths, figures)


class Draft(NamedTuple):
    """The tree of a step. names: of each node, for `NativeDrafts.source_of`; empty for a tree drafted by Python.

    draft_s: the time that drafting took.
    """

    tree: TokenTree
    names: list[int]
    draft_s: float = 0.0


class DecodedStep(NamedTuple):
    """One step of a segment. pass_us, verify_us: the time of its pass, and of verifying all trees of the pass."""

    draft: Draft
    path: tuple[int, ...]
    next_token: int
    pass_us: int
    verify_us: int

    @property
    def tokens(self) -> list[int]:
        """The tokens that the step commits."""
        if not self.path:
            return [self.next_token]
        return [*(int(self.draft.tree.tokens[node - 1]) for node in self.path), self.next_token]


class DecodedSteps(NamedTuple):
    """The steps of one segment, and the draft after them.

    is_over: the sequence has ended, or has no slots left. num_read: how many tokens its drafter has read.
    """

    steps: list[DecodedStep]
    draft: Draft
    is_over: bool
    num_read: int

    @property
    def tokens(self) -> list[int]:
        """The tokens that the steps commit."""
        return [token for step in self.steps for token in step.tokens]


def steps_of(decoded: Decoded, drafts: Sequence[Draft]) -> list[DecodedSteps]:
    """Return the steps of each segment. drafts: the drafts of the first steps."""
    node = path_start = 0
    names, paths, drafts = decoded.node_names.tolist(), decoded.paths.tolist(), list(drafts)
    steps: list[list[DecodedStep]] = [[] for _ in drafts]
    rows = zip(*(each.tolist() for each in decoded[:3]), decoded.figures.tolist(), strict=True)
    for path_lens, next_tokens, sizes, (pass_us, verify_us, draft_us, _) in rows:
        for place, (path_len, token, size) in enumerate(zip(path_lens, next_tokens, sizes, strict=True)):
            path = tuple(paths[path_start : path_start + path_len]) if path_len else ()
            steps[place].append(DecodedStep(drafts[place], path, token, pass_us, verify_us))
            end, tree = node + size, TokenTree.bare()
            if size:
                tree = TokenTree(decoded.node_tokens[node:end].copy(), decoded.node_parents[node:end].copy())
            drafts[place] = Draft(tree, names[node:end], 1e-6 * draft_us / len(drafts))
            node, path_start = end, path_start + path_len
    is_over, num_read = map(bool, decoded.is_over.tolist()), decoded.num_read.tolist()
    return [DecodedSteps(*each) for each in zip(steps, drafts, is_over, num_read, strict=True)]


def _members_of(sequence: Continuation) -> ctypes.Array[MemberFields]:
    members = sequence.drafts.members_or_self if sequence.drafts else ()
    return (MemberFields * len(members))(*(MemberFields(each.handle or None, each.max_nodes) for each in members))


def has_room(sequences: Sequence[Continuation], vocab_size: int) -> bool:
    """Return whether a pass has room for the full trees of all sequences that do not size their trees themselves."""
    fixed = [each.drafts.max_nodes for each in sequences if each.drafts and not each.drafts.is_sized]
    return max(fixed, default=0) <= _share(len(sequences), vocab_size)


def _max_nodes(sequences: Sequence[Continuation], vocab_size: int) -> list[int]:
    """Return the maximum number of nodes of each sequence in a pass."""
    share = _share(len(sequences), vocab_size)
    # A larger tree would get a pass of its own beside the steps of others.
    sized = share if len(sequences) == 1 else min(share, STEP_TOKENS)
    drafts = [each.drafts for each in sequences]
    return [min(each.max_nodes, sized if each.is_sized else share) if each else 0 for each in drafts]


def _share(count: int, vocab_size: int) -> int:
    """Return the maximum number of nodes that each of `count` sequences may have in a pass."""
    most_rows = min(MAX_LOGITS_BYTES // (4 * vocab_size), MAX_PASS_ROWS)
    return min(max(STEP_TOKENS, MAX_TREE_NODES // count), max(most_rows // count - 1, 0))
