"""Sampling in C++ for all rows of a pass (docs/wire.md, Arithmetic; the reference: `auditor/reference/`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from native.failures import check
from native.library import LIBRARY
from orchestrator.core.arrays import FloatArray, IdArray
from orchestrator.core.errors import EngineError
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution

#: dtype of the logits → its `sampling::Type` and its size in bytes.
TYPES = {"float32": (0, 4), "bfloat16": (1, 2), "float64": (2, 8)}
RULES = {Rule.COUPLED: 0, Rule.ENGINE: 0, Rule.REJECTION: 1, Rule.BLOCK: 2, Rule.TYPICAL: 3}
SEED_MASK = 2**64 - 1
MAX_TOP_K = 2**31 - 1


class Request(Structure):
    """One request's step, as `sampling::Request` (rules.h)."""

    _fields_ = [
        *((name, c_void_p) for name in (
            "logits", "parents", "tokens", "q_starts", "q_ids", "q_weights", "target_tokens", "path",
        )),
        ("seed", c_uint64),
        ("prefix_len", c_int64),
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "typical_p", "epsilon", "delta")),
        *((name, c_int32) for name in ("top_k", "type", "rule", "num_nodes", "path_len", "next_token")),
    ]  # fmt: skip


Requests = ctypes.Array[Request]


class Rows(NamedTuple):
    """Rows of logits in memory, (n, V), contiguous.

    dtype: a key of TYPES. owner: the object that owns the memory, kept alive with these rows.
    """

    address: int
    dtype: str
    owner: object = None

    @classmethod
    def of(cls, logits: FloatArray) -> Rows:
        """Return the rows of a C-contiguous float64 array."""
        if logits.dtype != np.float64 or not logits.flags.c_contiguous:
            raise EngineError(f"logits must be contiguous float64, not {logits.dtype}")
        return cls(logits.ctypes.data, "float64", logits)

    def row(self, index: int, vocab_size: int) -> int:
        """Return the address of a row."""
        return self.address + index * vocab_size * TYPES[self.dtype][1]


class Verified(NamedTuple):
    """What a step accepts: the nodes of the path, the next token and, if wanted, the target token at every node."""

    path: tuple[int, ...]
    next_token: int
    target_tokens: list[int] | None


class Step(NamedTuple):
    """One request's step. rows: (m + 1, V), of the root and the nodes. q: of nodes 1…m; empty: deterministic drafts."""

    rows: Rows
    tree: TokenTree
    q: tuple[Distribution, ...]
    prefix_len: int
    sampling: Sampling
    wants_target_tokens: bool


class Sampler:
    """The native functions. num_threads: threads that share the requests of a call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._verify = library.sampling_verify
        self._verify.argtypes = [c_void_p, c_size_t, c_size_t, c_int]
        self._log_p = library.sampling_log_p
        self._log_p.argtypes = [c_void_p, c_size_t, c_size_t, c_int, c_void_p]
        self._log_probs = library.sampling_log_probs
        self._log_probs.argtypes = [c_void_p, c_size_t, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p]
        self._top_ids = library.sampling_top_ids
        self._top_ids.argtypes = [c_void_p, c_size_t, c_size_t, c_size_t, c_void_p]
        self._draw = library.sampling_draw
        self._draw.argtypes = [c_void_p, c_void_p, c_size_t, *[c_uint64] * 4, c_size_t, c_void_p]
        for function in (self._verify, self._log_p, self._log_probs, self._top_ids, self._draw):
            function.restype = c_char_p
        self._elementary = {name: getattr(library, f"sampling_{name}") for name in ("log", "exp")}
        for function in self._elementary.values():
            function.argtypes, function.restype = [c_void_p, c_size_t, c_void_p], None
        self._noise = library.sampling_noise
        self._noise.argtypes = [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_void_p]
        self._noise.restype = None

    def verify(self, steps: Sequence[Step], vocab_size: int, num_threads: int = 1) -> list[Verified]:
        """Decide every step by its own rule; `Rule.ENGINE` counts as `coupled`.

        Invariant: each result equals that of `auditor.reference.decoding.decide`, and
        depends only on its own step.
        """
        if not steps:
            return []
        requests = requests_of([step.sampling for step in steps])
        sizes = [step.tree.num_nodes for step in steps]
        path, target_tokens = (c_int32 * sum(sizes))(), (c_int32 * (sum(sizes) + len(steps)))()
        kept: list[object] = []  # keeps the arrays alive during the call
        first = 0
        for number, (request, step, size) in enumerate(zip(requests, steps, sizes, strict=True)):
            request.rule = RULES[step.sampling.rule]
            request.logits, request.type = step.rows.address, TYPES[step.rows.dtype][0]
            request.prefix_len, request.num_nodes = step.prefix_len, size
            if size:
                arrays = [np.ascontiguousarray(each, np.int32) for each in (step.tree.parents, step.tree.tokens)]
                request.parents, request.tokens = (array.ctypes.data for array in arrays)
                request.path = ctypes.addressof(path) + ctypes.sizeof(c_int32) * first
                kept += arrays
            if step.wants_target_tokens:
                request.target_tokens = ctypes.addressof(target_tokens) + ctypes.sizeof(c_int32) * (first + number)
            if step.q:
                kept.append(_fill_q(request, step))
            first += size
        check(self._verify(requests, len(steps), vocab_size, num_threads), "sampling")
        found, first = [], 0
        for number, (request, step, size) in enumerate(zip(requests, steps, sizes, strict=True)):
            tokens = target_tokens[first + number :][: size + 1] if step.wants_target_tokens else None
            found.append(Verified(tuple(path[first : first + request.path_len]), request.next_token, tokens))
            first += size
        return found

    def target_tokens(
        self,
        rows: Rows,
        vocab_size: int,
        positions: Sequence[int],
        samplings: Sequence[Sampling],
        num_threads: int = 1,
    ) -> list[int]:
        """Return the target token of every row: argmax(log p + noise), ties to the lowest id.

        positions: (n,), the position of the token that each row decides. samplings: (n,).
        """
        requests = requests_of(samplings)
        _fill_rows(requests, rows, vocab_size)
        for request, position in zip(requests, positions, strict=True):
            request.prefix_len = position
        check(self._verify(requests, len(requests), vocab_size, num_threads), "sampling")
        return [request.next_token for request in requests]

    def log_p(self, rows: Rows, vocab_size: int, samplings: Sequence[Sampling], num_threads: int = 1) -> FloatArray:
        """Return log p of every row, (n, V) float64, −inf outside its support; samplings: (n,)."""
        requests = requests_of(samplings)
        _fill_rows(requests, rows, vocab_size)
        result = np.empty((len(requests), vocab_size))
        check(self._log_p(requests, len(requests), vocab_size, num_threads, result.ctypes.data), "sampling")
        return result

    def log_probs(
        self, rows: Rows, vocab_size: int, tokens: Sequence[int], num_top: int = 0
    ) -> tuple[FloatArray, IdArray, FloatArray]:
        """Return the log-probability of each row's token, (n,) float64, and its top tokens, by the raw logits.

        The top ids are (n, num_top) int32, the best first and the lowest id first among equals; their log-probabilities
        are float64 of the same shape.
        """
        requests = requests_of([Sampling()] * len(tokens))
        _fill_rows(requests, rows, vocab_size)
        ids = np.array(tokens, np.int32)
        log_probs = np.empty(len(ids))
        top_ids, top_log_probs = np.empty((len(ids), num_top), np.int32), np.empty((len(ids), num_top))
        outputs = log_probs.ctypes.data, num_top, top_ids.ctypes.data, top_log_probs.ctypes.data
        check(self._log_probs(requests, len(ids), vocab_size, ids.ctypes.data, *outputs), "sampling")
        return log_probs, top_ids, top_log_probs

    def top_ids(self, rows: Rows, vocab_size: int, num_rows: int, num_top: int) -> IdArray:
        """Return the most probable tokens of every row, (num_rows, num_top) int32, in the order of `log_probs`."""
        requests = (Request * num_rows)()
        _fill_rows(requests, rows, vocab_size)
        ids = np.empty((num_rows, num_top), np.int32)
        check(self._top_ids(requests, num_rows, vocab_size, num_top, ids.ctypes.data), "sampling")
        return ids

    def draw(self, q: Distribution, seed: int, position: int, stream: int, epoch: int, count: int = 1) -> IdArray:
        """Return `count` tokens drawn from q without replacement, in order: those with the largest log q + noise.

        Ties go to the lowest id. Returns (k,) int32, k ≤ count: q may have fewer tokens.
        """
        ids, weights = np.ascontiguousarray(q.ids, np.int32), np.ascontiguousarray(q.weights, np.float32)
        drawn = np.empty(min(count, len(ids)), np.int32)
        key = seed & SEED_MASK, position, stream, epoch
        check(
            self._draw(ids.ctypes.data, weights.ctypes.data, len(ids), *key, len(drawn), drawn.ctypes.data), "sampling"
        )
        tokens: IdArray = ids[drawn]
        return tokens

    def log(self, x: FloatArray) -> FloatArray:
        """Return log x within 1 ulp, the same bits on every machine: −∞ of 0, nan of a negative number."""
        return self._applied("log", x)

    def exp(self, x: FloatArray) -> FloatArray:
        """Return exp x for x ≤ 0 within 1 ulp, the same bits on every machine; 0 below −708."""
        return self._applied("exp", x)

    def _applied(self, name: str, x: FloatArray) -> FloatArray:
        x = np.ascontiguousarray(x, np.float64)
        result = np.empty_like(x)
        self._elementary[name](x.ctypes.data, x.size, result.ctypes.data)
        return result

    def noise(self, seeds: Sequence[int], positions: Sequence[int], tokens: npt.NDArray[np.int64]) -> FloatArray:
        """Return the target's noise g for each row's tokens, (n, k) float64; seeds, positions: (n,). tokens: (n, k)."""
        result = np.empty(tokens.shape)
        keys = np.array(seeds, np.uint64), np.array(positions, np.uint64), np.ascontiguousarray(tokens, np.uint64)
        self._noise(*(key.ctypes.data for key in keys), *tokens.shape, result.ctypes.data)
        return result


@cache
def sampler() -> Sampler:
    """Return the native functions; raises Unbuilt where they cannot be built or loaded."""
    return Sampler(LIBRARY.load())


def requests_of(samplings: Sequence[Sampling]) -> Requests:
    """Return requests with the parameters of the samplings; all else is 0, so the rule is `coupled`."""
    requests = (Request * len(samplings))()
    for request, sampling in zip(requests, samplings, strict=True):
        request.temperature, request.seed = sampling.temperature, sampling.seed & SEED_MASK
        request.top_k, request.top_p, request.min_p = min(sampling.top_k, MAX_TOP_K), sampling.top_p, sampling.min_p
        request.typical_p, request.epsilon, request.delta = sampling.typical_p, sampling.epsilon, sampling.delta
    return requests


def _fill_rows(requests: Requests, rows: Rows, vocab_size: int) -> None:
    """Give each request, whose tree is a bare root, its row."""
    for index, request in enumerate(requests):
        request.logits, request.type = rows.row(index, vocab_size), TYPES[rows.dtype][0]


def _fill_q(request: Request, step: Step) -> object:
    """Point the request to the q of a step; return the arrays that hold them."""
    if len(step.q) != step.tree.num_nodes:
        raise EngineError("a step needs one q for each node, or none")
    starts = np.cumsum([0, *(len(each.ids) for each in step.q)], dtype=np.int64)
    ids = np.concatenate([each.ids for each in step.q], dtype=np.int32)
    weights = np.concatenate([each.weights for each in step.q], dtype=np.float32)
    request.q_starts, request.q_ids, request.q_weights = (each.ctypes.data for each in (starts, ids, weights))
    return starts, ids, weights
