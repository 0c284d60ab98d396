"""What a decoded call or answer must satisfy beyond its types; each check raises EngineError.

Triton lets every process on the host reach the engines, so a broken message may cost its caller an error, never the
engine or another request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite

import numpy as np

from orchestrator.core.arrays import IdArray
from orchestrator.core.errors import EngineError, abbreviated
from orchestrator.core.messages.context import Delta
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.run import RunOptions, TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Step
from orchestrator.core.sampled_drafts import MAX_CANDIDATES, check_q
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.static_trees import MAX_WIDTH
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import MAX_FEATURE_ROWS, Acceptance, DraftResponse, EngineSpeculation, StepOptions

#: One more than the largest token id that an INT32 can hold.
MAX_VOCAB_SIZE = 1 << 31
_MAX_UINT64 = (1 << 64) - 1
_SHARE, _NOT_NEGATIVE = (0.0, 1.0), (0.0, inf)
#: The lowest and the highest value of each number of a sampling that may not have every finite value.
_BOUNDS = {
    "temperature": _NOT_NEGATIVE,
    "top_k": _NOT_NEGATIVE,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "repetition_penalty": (float(np.finfo(np.float32).tiny), inf),
    "presence_penalty": (-inf, inf),
    "frequency_penalty": (-inf, inf),
    "min_tokens": _NOT_NEGATIVE,
    "epsilon": _SHARE,
    "delta": _SHARE,
    "seed": (0, _MAX_UINT64),
}


def checked_target_call(call: object, vocab_size: int, max_nodes: int) -> StepRequest | TakeSteps:
    """Return a call that the target takes."""
    if isinstance(call, TakeSteps):
        return call
    if not isinstance(call, StepRequest):
        raise EngineError(f"the target takes steps and releases, not {type(call).__name__}")
    check_step(call, vocab_size, max_nodes)
    return call


def check_step(request: StepRequest, vocab_size: int, max_nodes: int) -> None:
    """Check a target step."""
    _check_delta(request.delta)
    check_tree(request.tree, vocab_size, max_nodes)
    for each in request.q:
        _check_shape("q.ids", each.ids.shape, 1)
        _check_shape("q.weights", each.weights.shape, 1, len(each.ids))
    check_q(request.tree, request.q, vocab_size)
    _check_sampling(request.sampling, vocab_size)
    _check_options(request.options, vocab_size)
    _check_range("deadline_ms", request.deadline_ms, 0, _MAX_UINT64)
    _check_range("max_len", request.max_len, 0, _MAX_UINT64)
    if request.run:
        _check_run(request.run, vocab_size)


def check_draft(request: DraftRequest) -> None:
    """Check a drafter's call."""
    _check_delta(request.delta)
    _check_sampling(request.sampling, MAX_VOCAB_SIZE)
    _check_range("max_nodes", request.max_nodes, 0, MAX_NODES)
    _check_range("max_depth", request.max_depth, 0, MAX_NODES)
    _check_range("deadline_ms", request.deadline_ms, 0, _MAX_UINT64)
    head = request.head
    check_tree(head.choices, MAX_CANDIDATES, MAX_NODES)
    _check_range("width", head.width, 0, MAX_WIDTH)
    _check_range("min_prob", head.min_prob, 0.0, 1.0)
    _check_range("sharpness", head.sharpness, 0.0, 1.0)
    _check_range("features_start", head.features_start, 0, _MAX_UINT64)
    if head.features is not None:
        _check_shape("features", head.features.shape, 2)
        _check_range("rows of features", len(head.features), 0, MAX_FEATURE_ROWS)


def check_tree(tree: TokenTree, vocab_size: int, max_nodes: int) -> None:
    """Check the invariants of TokenTree."""
    TokenTree.checked(tree.tokens, tree.parents, vocab_size, max_nodes)


def check_response(response: DraftResponse, vocab_size: int, max_nodes: int) -> None:
    """Check a drafter's answer; its q is checked where it is used."""
    check_tree(response.tree, vocab_size, max_nodes)
    _check_range("cached_len", response.cached_len, 0, _MAX_UINT64)


def check_steps(steps: Sequence[Step]) -> None:
    """Check the steps of a sequence that runs in the engine, at least one."""
    if not steps:
        raise EngineError("the target answered without a step")
    for step in steps:
        tree = step.proposal.tree
        check_tree(tree, MAX_VOCAB_SIZE, MAX_NODES)
        for name, values in (("sources", step.proposal.sources), ("q", step.proposal.q)):
            if len(values) not in (0, tree.num_nodes):
                raise EngineError(f"a tree of {tree.num_nodes} nodes has {len(values)} {name}")
        check_acceptance(step.acceptance, tree)


def check_acceptance(acceptance: Acceptance, tree: TokenTree) -> None:
    """Check the answer to a step with this tree."""
    path = acceptance.path
    for node, parent in zip(path, [0, *path], strict=False):
        if not 1 <= node <= tree.num_nodes or tree.parents[node - 1] != parent:
            raise EngineError(f"target accepted nodes {abbreviated(path)}, which are not a path of the tree")
    _check_range("next_token", acceptance.next_token, 0, MAX_VOCAB_SIZE - 1)
    num_tokens, num_nodes = acceptance.num_tokens, tree.num_nodes + 1
    for name, ndim, num_rows in (
        ("logprobs", 1, num_tokens),
        ("top_ids", 2, num_tokens),
        ("top_logprobs", 2, num_tokens),
        ("target_tokens", 1, num_nodes),
        ("node_top_ids", 2, num_nodes),
        ("features", 2, None),
    ):
        array = getattr(acceptance, name)
        if array is not None:
            _check_shape(name, array.shape, ndim, num_rows)
    if getattr(acceptance.top_ids, "shape", None) != getattr(acceptance.top_logprobs, "shape", None):
        raise EngineError("top_ids and top_logprobs must have the same shape in an engine call")
    result = acceptance.engine_speculation
    if result and (min(result.lengths, default=0) < 1 or sum(result.lengths) != len(result.extra) + 1):
        raise EngineError(f"target reports {len(result.extra) + 1} tokens, but passes of {result.lengths} tokens")


def _check_delta(delta: Delta) -> None:
    _check_shape("context_ids", delta.context_ids.shape, 1)
    for name in ("sequence_id", "context_start", "context_hash", "prompt_len"):
        _check_range(name, getattr(delta, name), 0, _MAX_UINT64)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    for name, (low, high) in _BOUNDS.items():
        _check_range(name, getattr(sampling, name), low, high)
    options = sampling.logits_options
    _check_ids("bias", [token for token, _ in options.bias], vocab_size)
    _check_ids("allowed", options.allowed, vocab_size)
    _check_ids("bad_words", [token for word in options.bad_words for token in word], vocab_size)
    _check_ids("end_ids", options.end_ids, vocab_size)
    if not all(isfinite(weight) for _, weight in options.bias):
        raise EngineError("bias has a weight that is not finite in an engine call")


def _check_options(options: StepOptions, vocab_size: int) -> None:
    _check_range("num_top", options.num_top, 0, vocab_size)
    _check_range("num_node_top", options.num_node_top, 0, vocab_size)
    if options.features_from is not None:
        _check_range("features_from", options.features_from, 0, _MAX_UINT64)
    if options.engine_speculation:
        _check_engine_speculation(options.engine_speculation)


def _check_engine_speculation(options: EngineSpeculation) -> None:
    if options.length < 1 or len(options.sizes) not in (0, 3):
        raise EngineError(
            f"an engine's own speculation must have a length of at least 1 and no or three sizes; "
            f"got {options.length}, {abbreviated(options.sizes)}"
        )


def _check_run(run: RunOptions, vocab_size: int) -> None:
    for name, value in (*vars(run.limits).items(), ("min_tokens", run.min_tokens)):
        _check_range(name, value, 0, _MAX_UINT64)
    _check_ids("stop_ids", run.stop_ids, vocab_size)
    _check_ids("prediction", run.prediction, vocab_size)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise EngineError(f"{name} must be a finite number in {low:g}..{high:g}, got {value:g} in an engine call")


def _check_ids(name: str, ids: Iterable[int] | IdArray, vocab_size: int) -> None:
    if any(not 0 <= token < vocab_size for token in ids):
        raise EngineError(f"{name} has an id outside 0..{vocab_size - 1} in an engine call")


def _check_shape(name: str, shape: tuple[int, ...], ndim: int, num_rows: int | None = None) -> None:
    if len(shape) != ndim or (num_rows is not None and shape[0] != num_rows):
        rows = "" if num_rows is None else f"{num_rows} rows and "
        raise EngineError(f"{name} must have {rows}{ndim} dimensions, got the shape {shape} in an engine call")
