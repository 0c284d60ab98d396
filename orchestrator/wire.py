"""What crosses the border between the loop and an engine: flat numpy tensors by name; knows neither Triton nor torch.

docs/protocol.md, Target wire and Drafter wire. Both sides pack and unpack with this module only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.context import Context
from orchestrator.errors import EngineError, EngineLost, RequestError, ServingError, Unavailable, UnknownSequence
from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance, Sampling, Want

Tensors = dict[str, npt.NDArray[Any]]

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
MAX_FEATURE_ROWS = 512


class WantBits(IntFlag):
    """The bits of `want`."""

    PICKS = 1
    LOGPROBS = 2
    FEATURES = 4


@dataclass(frozen=True, eq=False)
class Delta:
    """The committed tokens that an engine has not seen yet, and a name for those that it has.

    context_ids: (n,) int32, ids from position context_start on; the last one is the root.
    context_hash: rolling hash of the ids before context_start.
    """

    sequence_id: int
    context_start: int
    context_ids: npt.NDArray[np.int32]
    context_hash: int
    prompt_len: int
    cache_salt: str = ""

    @property
    def prefix_len(self) -> int:
        """Number of committed tokens."""
        return self.context_start + len(self.context_ids)


@dataclass(frozen=True, eq=False)
class StepRequest:
    """One target step. deadline_ms: how long the engine may take, from its receipt on."""

    delta: Delta
    tree: TokenTree
    sampling: Sampling
    want: Want
    deadline_ms: int


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """One call of a drafter."""

    delta: Delta
    sampling: Sampling
    max_nodes: int
    max_depth: int


@dataclass(frozen=True, eq=False)
class Drafted:
    """A drafter's answer. cached_len: how many of the context's tokens it has computed."""

    tree: TokenTree
    cached_len: int


def delta_of(context: Context, start: int, sequence_id: int, cache_salt: str) -> Delta:
    """Return what an engine that holds the first `start` tokens lacks."""
    ids = np.array(context.ids[start:], np.int32)
    return Delta(sequence_id, start, ids, context.rolling_hash(start), context.prompt_len, cache_salt)


def _pack_delta(delta: Delta) -> Tensors:
    tensors: Tensors = {
        "sequence_id": np.array([delta.sequence_id], np.uint64),
        "context_start": np.array([delta.context_start], np.int32),
        "context_ids": delta.context_ids,
        "context_hash": np.array([delta.context_hash], np.uint64),
        "prompt_len": np.array([delta.prompt_len], np.int32),
    }
    return tensors | _pack_text("cache_salt", delta.cache_salt)


def _pack_text(name: str, text: str) -> Tensors:
    return {name: np.array([text.encode()], np.object_)} if text else {}


def _text(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> str:
    return tensors[name].reshape(-1)[0].decode() if name in tensors else ""


def _scalar(tensors: Mapping[str, npt.NDArray[Any]], name: str, default: int | None = None) -> int:
    if name in tensors and tensors[name].size:
        return int(tensors[name].reshape(-1)[0])
    if default is None:
        raise EngineError(f"tensor {name!r} is missing from an engine call")
    return default


def _ids(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> npt.NDArray[np.int32]:
    return tensors.get(name, _EMPTY).reshape(-1).astype(np.int32, copy=False)


_EMPTY = np.empty(0, np.int32)


def _unpack_delta(tensors: Mapping[str, npt.NDArray[Any]]) -> Delta:
    return Delta(
        _scalar(tensors, "sequence_id"),
        _scalar(tensors, "context_start", 0),
        _ids(tensors, "context_ids"),
        _scalar(tensors, "context_hash", 0),
        _scalar(tensors, "prompt_len", 0),
        _text(tensors, "cache_salt"),
    )


def _pack_sampling(sampling: Sampling) -> Tensors:
    values = [float(getattr(sampling, name)) for name in SAMPLING_FIELDS]
    return {"sampling": np.array(values, np.float32), "seed": np.array([sampling.seed], np.uint64)}


def _unpack_sampling(tensors: Mapping[str, npt.NDArray[Any]]) -> Sampling:
    values = tensors.get("sampling")
    if values is None or values.size != len(SAMPLING_FIELDS):
        raise EngineError(f"tensor 'sampling' must hold {', '.join(SAMPLING_FIELDS)}")
    temperature, top_k, top_p, min_p = (float(x) for x in values.reshape(-1))
    return Sampling(temperature, int(top_k), top_p, min_p, seed=_scalar(tensors, "seed", 0))


def pack_tree(tree: TokenTree) -> Tensors:
    """Pack a tree; a bare root packs to nothing, since empty tensors are omitted."""
    if not tree.num_nodes:
        return {}
    return {"node_ids": tree.tokens, "node_parents": tree.parents}


def unpack_tree(tensors: Mapping[str, npt.NDArray[Any]], vocab_size: int, max_nodes: int) -> TokenTree:
    """Unpack and check a tree; raises EngineError when it breaks a law."""
    return TokenTree.checked(_ids(tensors, "node_ids"), _ids(tensors, "node_parents"), vocab_size, max_nodes)


def pack_step(request: StepRequest) -> Tensors:
    """Pack a target step."""
    want = request.want
    bits = WantBits.PICKS * want.picks | WantBits.LOGPROBS * want.logprobs
    tensors = _pack_delta(request.delta) | pack_tree(request.tree) | _pack_sampling(request.sampling)
    if want.features_from is not None:
        bits |= WantBits.FEATURES
        tensors["features_from"] = np.array([want.features_from], np.int32)
    tensors["want"] = np.array([bits], np.int32)
    tensors["deadline_ms"] = np.array([request.deadline_ms], np.int32)
    return tensors


def unpack_step(tensors: Mapping[str, npt.NDArray[Any]], vocab_size: int, max_nodes: int) -> StepRequest:
    """Unpack a target step; raises EngineError when a tensor is missing or breaks a law."""
    bits = WantBits(_scalar(tensors, "want", 0))
    features_from = _scalar(tensors, "features_from", 0) if bits & WantBits.FEATURES else None
    return StepRequest(
        _unpack_delta(tensors),
        unpack_tree(tensors, vocab_size, max_nodes),
        _unpack_sampling(tensors),
        Want(bool(bits & WantBits.PICKS), bool(bits & WantBits.LOGPROBS), features_from),
        _scalar(tensors, "deadline_ms"),
    )


def pack_acceptance(acceptance: Acceptance) -> Tensors:
    """Pack the answer of a target step; what was not wanted or is empty is omitted."""
    tensors: Tensors = {
        "next_token": np.array([acceptance.next_token], np.int32),
        "forward_us": np.array([acceptance.forward_us], np.int32),
        "num_in_pass": np.array([acceptance.num_in_pass], np.int32),
        "num_cached_tokens": np.array([acceptance.num_cached_tokens], np.int32),
    }
    if acceptance.path:
        tensors["path"] = np.array(acceptance.path, np.int32)
    if acceptance.picks is not None:
        tensors["picks"] = acceptance.picks
    if acceptance.logprobs is not None:
        tensors["logprobs"] = acceptance.logprobs.astype(np.float64)
    if acceptance.features is not None and len(acceptance.features):
        tensors["features"] = acceptance.features
        tensors["features_start"] = np.array([acceptance.features_start], np.int32)
    return tensors


def unpack_acceptance(tensors: Mapping[str, npt.NDArray[Any]], tree: TokenTree) -> Acceptance:
    """Unpack the answer of a target step; raises EngineError when the path is none of the tree's."""
    path = tuple(_ids(tensors, "path").tolist())
    parents = [0, *path][: len(path)]
    for node, parent in zip(path, parents, strict=True):
        if not 1 <= node <= tree.num_nodes or tree.parents[node - 1] != parent:
            raise EngineError(f"target accepted path {path}, which is none of the tree's")
    return Acceptance(
        path,
        _scalar(tensors, "next_token"),
        tensors.get("picks"),
        tensors.get("logprobs"),
        tensors.get("features"),
        _scalar(tensors, "features_start", 0),
        _scalar(tensors, "forward_us", 0),
        _scalar(tensors, "num_in_pass", 1),
        _scalar(tensors, "num_cached_tokens", 0),
    )


def pack_draft(request: DraftRequest) -> Tensors:
    """Pack a drafter's call."""
    return (
        _pack_delta(request.delta)
        | _pack_sampling(request.sampling)
        | {
            "max_nodes": np.array([request.max_nodes], np.int32),
            "max_depth": np.array([request.max_depth], np.int32),
        }
    )


def unpack_draft(tensors: Mapping[str, npt.NDArray[Any]]) -> DraftRequest:
    """Unpack a drafter's call."""
    return DraftRequest(
        _unpack_delta(tensors),
        _unpack_sampling(tensors),
        _scalar(tensors, "max_nodes"),
        _scalar(tensors, "max_depth"),
    )


def pack_drafted(drafted: Drafted) -> Tensors:
    """Pack a drafter's answer."""
    return pack_tree(drafted.tree) | {"cached_len": np.array([drafted.cached_len], np.int32)}


def pack_release(sequence_id: int) -> Tensors:
    """Pack the end of a sequence."""
    return {
        "sequence_id": np.array([sequence_id], np.uint64),
        "release": np.array([True], np.bool_),
    }


def released(tensors: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return the id of the sequence that a call ends, or 0 for any other call."""
    ends = "release" in tensors and bool(tensors["release"].reshape(-1)[0])
    return _scalar(tensors, "sequence_id") if ends else 0


def deadline_ms(tensors: Mapping[str, npt.NDArray[Any]], default: int) -> int:
    """Return how long a call may take."""
    return _scalar(tensors, "deadline_ms", default)


# Triton carries an error as text alone; the first word says which of ours it is. The first kind that fits names it.
_CODES: dict[str, type[ServingError]] = {
    "unknown_sequence": UnknownSequence,
    "unavailable": Unavailable,
    "request": RequestError,
    "lost": EngineLost,
    "engine": EngineError,
}


def error_text(error: ServingError) -> str:
    """Word an error for the wire."""
    code = next((c for c, kind in _CODES.items() if isinstance(error, kind)), "engine")
    return f"{code}: {error}"


def error_from(text: str) -> ServingError:
    """Return the error that `text` words; text of Triton's own means that the engine was not reached."""
    code, _, message = text.partition(": ")
    kind = _CODES.get(code)
    return kind(message) if kind else EngineLost(text)
