"""A target step and its answer as flat tensors (docs/wire.md, Target wire); knows neither Triton nor torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.messages.context import Delta, pack_delta, unpack_delta
from orchestrator.core.messages.engine_speculation import (
    pack_engine_speculation,
    pack_engine_speculation_result,
    unpack_engine_speculation,
    unpack_engine_speculation_result,
)
from orchestrator.core.messages.run import (
    RunOptions,
    TakeSteps,
    checked_path,
    pack_run,
    pack_steps,
    unpack_logprobs,
    unpack_run,
    unpack_take,
)
from orchestrator.core.messages.sampling import pack_sampling, unpack_sampling
from orchestrator.core.messages.tensors import (
    Incoming,
    Tensors,
    bounded,
    ids,
    pack_ids,
    pack_nonzero,
    pack_scalars,
    packed_us,
    scalar,
    table,
    unpack_features,
)
from orchestrator.core.messages.tree import pack_tree, unpack_q, unpack_tree
from orchestrator.core.proposal import Step
from orchestrator.core.sampling.sampled_drafts import check_q
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, HiddenStates, StepOptions

# The bits of `wanted`: two flags, then those of HiddenStates, shifted to 4 and 8.
TARGET_TOKENS_BIT, LOGPROBS_BIT, HIDDEN_STATES_SHIFT = 1, 2, 2


@dataclass(frozen=True, eq=False)
class StepRequest:
    """One target step.

    deadline_ms: how long the engine may take, counted from when it receives the call.
    q: the distribution from which each node of the tree was sampled; empty for deterministic drafts.
    run: begins a run of steps, for which the engine drafts by itself; the tree is bare.
    max_len: maximum tokens that the sequence will ever need slots for, including drafts; 0 = unknown.
    """

    delta: Delta
    tree: TokenTree
    sampling: Sampling
    options: StepOptions
    deadline_ms: int
    q: tuple[Distribution, ...] = ()
    run: RunOptions | None = None
    max_len: int = 0


def pack_step(request: StepRequest) -> Tensors:
    """Pack a target step."""
    return (
        pack_delta(request.delta)
        | pack_tree(request.tree, request.q)
        | pack_sampling(request.sampling)
        | _pack_options(request.options)
        | pack_scalars(deadline_ms=request.deadline_ms)
        | pack_nonzero(max_len=request.max_len)
        | pack_run(request.run)
    )


def unpack_step(tensors: Incoming, vocab_size: int, max_nodes: int) -> StepRequest:
    """Unpack a target step; raise EngineError if a tensor is missing or invalid."""
    tree, q = unpack_tree(tensors, vocab_size, max_nodes), unpack_q(tensors)
    check_q(tree, q, vocab_size)
    return StepRequest(
        unpack_delta(tensors),
        tree,
        unpack_sampling(tensors, vocab_size),
        _unpack_options(tensors, vocab_size),
        scalar(tensors, "deadline_ms"),
        q,
        unpack_run(tensors, vocab_size),
        scalar(tensors, "max_len", 0),
    )


def unpack_call(tensors: Incoming, vocab_size: int, max_nodes: int) -> StepRequest | TakeSteps:
    """Unpack a step, the beginning of a run, or the call for its next steps; raise EngineError like `unpack_step`."""
    return unpack_take(tensors) or unpack_step(tensors, vocab_size, max_nodes)


def _pack_options(options: StepOptions) -> Tensors:
    wanted = TARGET_TOKENS_BIT * options.target_tokens | LOGPROBS_BIT * options.logprobs
    wanted |= options.hidden_states << HIDDEN_STATES_SHIFT
    tensors = pack_nonzero(wanted=wanted, num_top=options.num_top, num_node_top=options.num_node_top)
    if options.features_from is not None:
        tensors |= pack_scalars(features_from=options.features_from)
    return tensors | pack_engine_speculation(options.engine_speculation)


def _unpack_options(tensors: Incoming, vocab_size: int) -> StepOptions:
    wanted = scalar(tensors, "wanted", 0)
    hidden_states = HiddenStates(wanted >> HIDDEN_STATES_SHIFT) & (HiddenStates.LAST | HiddenStates.LAYERS)
    return StepOptions(
        target_tokens=bool(wanted & TARGET_TOKENS_BIT),
        logprobs=bool(wanted & LOGPROBS_BIT),
        features_from=scalar(tensors, "features_from", 0) if hidden_states else None,
        num_top=bounded(tensors, "num_top", vocab_size, 0),
        hidden_states=hidden_states,
        engine_speculation=unpack_engine_speculation(tensors),
        num_node_top=scalar(tensors, "num_node_top", 0),
    )


def pack_acceptance(acceptance: Acceptance) -> Tensors:
    """Pack the answer to a target step; fields that are empty or were not requested are omitted."""
    tensors = pack_ids("path", acceptance.path) | pack_scalars(
        next_token=acceptance.next_token,
        queue_us=packed_us(acceptance.queue_us),
        forward_us=packed_us(acceptance.forward_us),
        verify_us=packed_us(acceptance.verify_us),
        num_in_pass=acceptance.num_in_pass,
        num_in_separate_pass=acceptance.num_in_separate_pass,
        num_cached_tokens=acceptance.num_cached_tokens,
    )
    if acceptance.target_tokens is not None:
        tensors["target_tokens"] = acceptance.target_tokens
    if acceptance.logprobs is not None:
        tensors["logprobs"] = acceptance.logprobs.astype(np.float64)
    if acceptance.top_ids is not None and acceptance.top_logprobs is not None:
        tensors |= {"top_ids": acceptance.top_ids, "top_logprobs": acceptance.top_logprobs}
    if acceptance.node_top_ids is not None:
        tensors["node_top_ids"] = acceptance.node_top_ids
    if acceptance.features is not None and len(acceptance.features):
        tensors |= {"features": acceptance.features} | pack_scalars(features_start=acceptance.features_start)
    return tensors | pack_engine_speculation_result(acceptance.engine_speculation)


def pack_answer(answer: Acceptance | list[Step]) -> Tensors:
    """Pack the answer to a step or to a run."""
    return pack_steps(answer) if isinstance(answer, list) else pack_acceptance(answer)


def unpack_acceptance(tensors: Incoming, tree: TokenTree) -> Acceptance:
    """Unpack the answer to a target step; raise EngineError if a tensor is invalid, or the path is not in the tree."""
    path = checked_path(ids(tensors, "path").tolist(), tree)
    inside = unpack_engine_speculation_result(tensors)
    logprobs, top_ids, top_logprobs = unpack_logprobs(tensors, len(path) + 1 + (len(inside.extra) if inside else 0))
    return Acceptance(
        path,
        scalar(tensors, "next_token"),
        target_tokens=table(tensors, "target_tokens", np.int32, 1, tree.num_nodes + 1),
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        features=unpack_features(tensors),
        features_start=scalar(tensors, "features_start", 0),
        forward_us=scalar(tensors, "forward_us", 0),
        num_in_pass=scalar(tensors, "num_in_pass", 1),
        num_cached_tokens=scalar(tensors, "num_cached_tokens", 0),
        engine_speculation=inside,
        queue_us=scalar(tensors, "queue_us", 0),
        verify_us=scalar(tensors, "verify_us", 0),
        node_top_ids=table(tensors, "node_top_ids", np.int32, 2, tree.num_nodes + 1),
        num_in_separate_pass=scalar(tensors, "num_in_separate_pass", 0),
    )
