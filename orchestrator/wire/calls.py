"""What crosses the border between the loop and an engine: flat numpy tensors by name; knows neither Triton nor torch.

docs/protocol.md, Target wire and Drafter wire. Both sides pack and unpack with this module only; its parts (wire_want,
wire_sampling, …) stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, Distribution, DraftResponse, HeadInput, IdArray, StepOptions
from orchestrator.sampling.sampled_drafts import check_drawn
from orchestrator.wire.engine_speculation import pack_engine_speculation_result, unpack_engine_speculation_result
from orchestrator.wire.head_input import NO_HEAD_INPUT, pack_head_input, unpack_head_input
from orchestrator.wire.sampling import pack_sampling, unpack_sampling
from orchestrator.wire.step_options import pack_step_options, unpack_step_options
from orchestrator.wire.tensors import Incoming, Tensors, bounded, ids, numbers, pack_ids, pack_text, runs, scalar, text


@dataclass(frozen=True, eq=False)
class Delta:
    """The committed tokens that an engine has not seen yet, and a name for those that it has.

    context_ids: (n,) int32, ids from position context_start on; the last one is the root.
    context_hash: rolling hash of the ids before context_start.
    """

    sequence_id: int
    context_start: int
    context_ids: IdArray
    context_hash: int
    prompt_len: int
    cache_salt: str = ""

    @property
    def prefix_len(self) -> int:
        """Number of committed tokens."""
        return self.context_start + len(self.context_ids)


@dataclass(frozen=True, eq=False)
class StepRequest:
    """One target step. deadline_ms: how long the engine may take, from its receipt on.

    q: what the nodes of the tree were drawn from; empty = chosen.
    """

    delta: Delta
    tree: TokenTree
    sampling: Sampling
    options: StepOptions
    deadline_ms: int
    q: tuple[Distribution, ...] = ()


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """One call of a drafter; `head` is for those that read the target's hidden states.

    deadline_ms: how long the drafter may take, from its receipt on; 0 = the engine's usual limit.
    """

    delta: Delta
    sampling: Sampling
    max_nodes: int
    max_depth: int
    head: HeadInput = NO_HEAD_INPUT
    deadline_ms: int = 0


def delta_of(context: Context, start: int, sequence_id: int, cache_salt: str) -> Delta:
    """Return what an engine that holds the first `start` tokens lacks."""
    new_ids = np.array(context.ids[start:], np.int32)
    return Delta(sequence_id, start, new_ids, context.rolling_hash(start), context.prompt_len, cache_salt)


def _pack_delta(delta: Delta) -> Tensors:
    tensors: Tensors = {
        "sequence_id": np.array([delta.sequence_id], np.uint64),
        "context_start": np.array([delta.context_start], np.int32),
        "context_ids": delta.context_ids,
        "context_hash": np.array([delta.context_hash], np.uint64),
        "prompt_len": np.array([delta.prompt_len], np.int32),
    }
    return tensors | pack_text("cache_salt", delta.cache_salt)


def _unpack_delta(tensors: Incoming) -> Delta:
    return Delta(
        scalar(tensors, "sequence_id"),
        scalar(tensors, "context_start", 0),
        ids(tensors, "context_ids"),
        scalar(tensors, "context_hash", 0),
        scalar(tensors, "prompt_len", 0),
        text(tensors, "cache_salt"),
    )


def pack_tree(tree: TokenTree) -> Tensors:
    """Pack a tree; a bare root packs to nothing, since empty tensors are omitted."""
    if not tree.num_nodes:
        return {}
    return {"node_ids": tree.tokens, "node_parents": tree.parents}


def unpack_tree(tensors: Incoming, vocab_size: int, max_nodes: int) -> TokenTree:
    """Unpack and check a tree; raises EngineError when it breaks a law."""
    return TokenTree.checked(ids(tensors, "node_ids"), ids(tensors, "node_parents"), vocab_size, max_nodes)


def _pack_q(q: tuple[Distribution, ...]) -> Tensors:
    """Pack what the nodes were drawn from; a chosen draft packs to nothing."""
    if not q:
        return {}
    return {
        "q_counts": np.array([len(drawn_from.ids) for drawn_from in q], np.int32),
        "q_ids": np.concatenate([drawn_from.ids for drawn_from in q]),
        "q_probs": np.concatenate([drawn_from.weights for drawn_from in q]),
    }


def _unpack_q(tensors: Incoming) -> tuple[Distribution, ...]:
    counts = ids(tensors, "q_counts").tolist()
    parts = zip(
        runs(ids(tensors, "q_ids"), counts, "q_ids"), runs(numbers(tensors, "q_probs"), counts, "q_probs"), strict=True
    )
    return tuple(Distribution(*part) for part in parts)


def pack_step(request: StepRequest) -> Tensors:
    """Pack a target step."""
    tensors = _pack_delta(request.delta) | pack_tree(request.tree) | _pack_q(request.q)
    tensors |= pack_sampling(request.sampling) | pack_step_options(request.options)
    tensors["deadline_ms"] = np.array([request.deadline_ms], np.int32)
    return tensors


def unpack_step(tensors: Incoming, vocab_size: int, max_nodes: int) -> StepRequest:
    """Unpack a target step; raises EngineError when a tensor is missing or breaks a law."""
    tree, q = unpack_tree(tensors, vocab_size, max_nodes), _unpack_q(tensors)
    check_drawn(tree, q, vocab_size)
    return StepRequest(
        _unpack_delta(tensors),
        tree,
        unpack_sampling(tensors),
        unpack_step_options(tensors),
        scalar(tensors, "deadline_ms"),
        q,
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
    if acceptance.target_tokens is not None:
        tensors["picks"] = acceptance.target_tokens
    if acceptance.logprobs is not None:
        tensors["logprobs"] = acceptance.logprobs.astype(np.float64)
    if acceptance.top_ids is not None and acceptance.top_logprobs is not None:
        tensors |= {"top_ids": acceptance.top_ids, "top_logprobs": acceptance.top_logprobs}
    if acceptance.features is not None and len(acceptance.features):
        tensors["features"] = acceptance.features
        tensors["features_start"] = np.array([acceptance.features_start], np.int32)
    return tensors | pack_engine_speculation_result(acceptance.engine_speculation)


def unpack_acceptance(tensors: Incoming, tree: TokenTree) -> Acceptance:
    """Unpack the answer of a target step; raises EngineError when the path is none of the tree's."""
    path = tuple(ids(tensors, "path").tolist())
    parents = [0, *path][: len(path)]
    for node, parent in zip(path, parents, strict=True):
        if not 1 <= node <= tree.num_nodes or tree.parents[node - 1] != parent:
            raise EngineError(f"target accepted path {path}, which is none of the tree's")
    return Acceptance(
        path,
        scalar(tensors, "next_token"),
        tensors.get("picks"),
        tensors.get("logprobs"),
        tensors.get("top_ids"),
        tensors.get("top_logprobs"),
        tensors.get("features"),
        scalar(tensors, "features_start", 0),
        scalar(tensors, "forward_us", 0),
        scalar(tensors, "num_in_pass", 1),
        scalar(tensors, "num_cached_tokens", 0),
        unpack_engine_speculation_result(tensors),
    )


def pack_draft_request(request: DraftRequest) -> Tensors:
    """Pack a drafter's call."""
    return (
        _pack_delta(request.delta)
        | pack_sampling(request.sampling)
        | {
            "max_nodes": np.array([request.max_nodes], np.int32),
            "max_depth": np.array([request.max_depth], np.int32),
        }
        | pack_head_input(request.head)
        | pack_ids("deadline_ms", [request.deadline_ms] if request.deadline_ms else [])
    )


def unpack_draft_request(tensors: Incoming) -> DraftRequest:
    """Unpack a drafter's call; raises EngineError when a tensor is missing or breaks a law."""
    return DraftRequest(
        _unpack_delta(tensors),
        unpack_sampling(tensors),
        bounded(tensors, "max_nodes", MAX_NODES),
        bounded(tensors, "max_depth", MAX_NODES),
        unpack_head_input(tensors),
        scalar(tensors, "deadline_ms", 0),
    )


def pack_draft_response(drafted: DraftResponse) -> Tensors:
    """Pack a drafter's answer."""
    return pack_tree(drafted.tree) | _pack_q(drafted.q) | {"cached_len": np.array([drafted.cached_len], np.int32)}


def unpack_draft_response(tensors: Incoming, vocab_size: int, max_nodes: int) -> DraftResponse:
    """Unpack a drafter's answer; raises EngineError when its tree breaks a law. Its q is checked by `Guarded`."""
    tree = unpack_tree(tensors, vocab_size, max_nodes)
    return DraftResponse(tree, _unpack_q(tensors), scalar(tensors, "cached_len", 0))


def pack_release(sequence_id: int) -> Tensors:
    """Pack the end of a sequence."""
    return {
        "sequence_id": np.array([sequence_id], np.uint64),
        "release": np.array([True], np.bool_),
    }


def released(tensors: Incoming) -> int:
    """Return the id of the sequence that a call ends, or 0 for any other call."""
    ends = "release" in tensors and bool(tensors["release"].reshape(-1)[0])
    return scalar(tensors, "sequence_id") if ends else 0


def deadline_ms(tensors: Incoming, default: int) -> int:
    """Return how long a call may take."""
    return scalar(tensors, "deadline_ms", default)
