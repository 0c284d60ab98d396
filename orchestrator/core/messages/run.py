"""Runs, the steps that the target's engine runs on its own, as flat tensors (docs/wire.md, Runs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.core.arrays import IdArray
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import EngineError, abbreviated
from orchestrator.core.messages.tensors import (
    MAX_VOCAB_SIZE,
    Incoming,
    Tensors,
    ids,
    pack_ids,
    pack_text,
    packed_us,
    scalar,
    split,
    table,
    text,
    tokens,
)
from orchestrator.core.messages.tree import pack_tree, unpack_q
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, Distribution

#: The numbers of one row of `steps`; times are in µs.
COLUMNS = (
    "num_nodes", "num_accepted", "next_token", "queue", "forward", "verify", "num_in_pass", "num_cached", "draft",
    "target",
)  # fmt: skip
#: What a client may ask for: tensors with one row for each emitted token.
LOGPROBS = ("logprobs", "top_ids", "top_logprobs")
_LIMITS = 4
_NAMES_END = "\n"


@dataclass(frozen=True)
class RunOptions:
    """What an engine needs to draft for a sequence by itself, besides its context and its sampling.

    method, config: the drafting method and the JSON of its parameters. prediction: what the client expects as output.
    stop_ids: the run ends after one of these that comes after the first `min_tokens` of the output.
    """

    method: str
    config: str
    limits: Limits
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True)
class TakeSteps:
    """The call for the steps of a run that the caller lacks. prefix_len: number of committed tokens that it has."""

    sequence_id: int
    prefix_len: int


def pack_run(options: RunOptions | None) -> Tensors:
    """Pack the options of a run, if there are any."""
    if options is None:
        return {}
    limits = options.limits
    numbers = (limits.max_tokens, limits.max_positions, limits.max_nodes, options.min_tokens)
    return (
        pack_text("run_method", options.method)
        | pack_text("run_config", options.config)
        | pack_ids("run_limits", numbers)
        | pack_ids("run_stop_ids", options.stop_ids)
        | pack_ids("run_prediction", options.prediction)
    )


def unpack_run(tensors: Incoming, vocab_size: int = MAX_VOCAB_SIZE) -> RunOptions | None:
    """Unpack the options of a run, if there are any; raise EngineError if a tensor is invalid."""
    if "run_method" not in tensors:
        return None
    numbers = ids(tensors, "run_limits").tolist()
    if len(numbers) != _LIMITS or min(numbers) < 0:
        raise EngineError(f"run_limits must have {_LIMITS} numbers of at least 0, got {abbreviated(numbers)}")
    return RunOptions(
        text(tensors, "run_method"),
        text(tensors, "run_config"),
        Limits(*numbers[:3]),
        numbers[3],
        tuple(tokens(tensors, "run_stop_ids", vocab_size)),
        tuple(tokens(tensors, "run_prediction", vocab_size)),
    )


def pack_take(take: TakeSteps) -> Tensors:
    """Pack the call for the next steps of a run."""
    return {"sequence_id": np.array([take.sequence_id], np.uint64)} | pack_ids("prefix_len", [take.prefix_len])


def unpack_take(tensors: Incoming) -> TakeSteps | None:
    """Unpack the call for the next steps of a run; return None for any other call."""
    return TakeSteps(scalar(tensors, "sequence_id"), scalar(tensors, "prefix_len")) if "prefix_len" in tensors else None


def pack_steps(steps: Sequence[Step]) -> Tensors:
    """Pack the steps of a run, at least one: a row of numbers each; trees, paths and the rest are concatenated."""
    names = list(dict.fromkeys(source for step in steps for source in step.proposal.sources))
    number_of = {name: number for number, name in enumerate(names)}
    tensors: Tensors = {"steps": np.array([_row(step) for step in steps], np.int32)}
    joined = TokenTree(
        np.concatenate([step.proposal.tree.tokens for step in steps]),
        np.concatenate([step.proposal.tree.parents for step in steps]),
    )
    tensors |= pack_tree(joined, tuple(q for step in steps for q in step.proposal.q))
    tensors |= pack_ids("node_sources", [number_of[source] for step in steps for source in step.proposal.sources])
    tensors |= pack_text("source_names", _NAMES_END.join(names))
    tensors |= pack_ids("path", [node for step in steps for node in step.acceptance.path])
    for name in LOGPROBS:
        parts = [getattr(step.acceptance, name) for step in steps]
        if parts[0] is not None:
            tensors[name] = np.concatenate(parts)
    return tensors


def _row(step: Step) -> tuple[int, ...]:
    tree, acceptance = step.proposal.tree, step.acceptance
    return (
        tree.num_nodes, len(acceptance.path), acceptance.next_token, packed_us(acceptance.queue_us),
        packed_us(acceptance.forward_us), packed_us(acceptance.verify_us), acceptance.num_in_pass,
        acceptance.num_cached_tokens, packed_us(1e6 * step.draft_s), packed_us(1e6 * step.target_s),
    )  # fmt: skip


def unpack_steps(tensors: Incoming) -> list[Step]:
    """Unpack the steps of a run, at least one; raise EngineError if a tensor is invalid, or they do not match."""
    rows = _rows(tensors)
    nodes, accepted = [row[0] for row in rows], [row[1] for row in rows]
    committed = [count + 1 for count in accepted]
    names = text(tensors, "source_names").split(_NAMES_END)
    sources = [names[number] for number in tokens(tensors, "node_sources", len(names))]
    q = unpack_q(tensors)
    parts = zip(
        rows,
        split(ids(tensors, "node_ids"), nodes, "node_ids"),
        split(ids(tensors, "node_parents"), nodes, "node_parents"),
        split(sources, nodes, "node_sources"),
        split(q, nodes if q else [0] * len(rows), "q_counts"),
        split(ids(tensors, "path").tolist(), accepted, "path"),
        *(
            [None] * len(rows) if values is None else split(values, committed, name)
            for name, values in zip(LOGPROBS, unpack_logprobs(tensors, sum(committed)), strict=True)
        ),
        strict=True,
    )
    return [_step(*each) for each in parts]


def _rows(tensors: Incoming) -> list[list[int]]:
    """Return the rows of `steps`; raise EngineError if there is none, or a number is negative."""
    numbers = ids(tensors, "steps")
    if not len(numbers) or len(numbers) % len(COLUMNS) or numbers.min() < 0:
        raise EngineError(f"steps must have rows of {len(COLUMNS)} numbers of at least 0, got {abbreviated(numbers)}")
    rows: list[list[int]] = numbers.reshape(-1, len(COLUMNS)).tolist()
    return rows


def _step(
    row: list[int],
    node_ids: IdArray,
    parents: IdArray,
    sources: list[str],
    q: Sequence[Distribution],
    path: list[int],
    logprobs: Any,
    top_ids: Any,
    top_logprobs: Any,
) -> Step:
    _, _, next_token, queue_us, forward_us, verify_us, num_in_pass, num_cached, draft_us, target_us = row
    tree = TokenTree.checked(node_ids, parents, MAX_VOCAB_SIZE, MAX_NODES) if len(node_ids) else TokenTree.bare()
    acceptance = Acceptance(
        checked_path(path, tree),
        next_token,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        queue_us=queue_us,
        forward_us=forward_us,
        verify_us=verify_us,
        num_in_pass=num_in_pass,
        num_cached_tokens=num_cached,
    )
    proposal = Proposal(tree, tuple(sources), tuple(q)) if sources else Proposal.empty()
    return Step(proposal, acceptance, draft_us / 1e6, target_us / 1e6)


def checked_path(path: list[int], tree: TokenTree) -> tuple[int, ...]:
    """Return the accepted nodes; raise EngineError unless each is the child of the one before it."""
    for node, parent in zip(path, [0, *path], strict=False):
        if not 1 <= node <= tree.num_nodes or tree.parents[node - 1] != parent:
            raise EngineError(f"target accepted nodes {abbreviated(tuple(path))}, which are not a path of the tree")
    return tuple(path)


def unpack_logprobs(tensors: Incoming, num_tokens: int) -> tuple[npt.NDArray[Any] | None, ...]:
    """Return the tensors LOGPROBS, None for each that was omitted; raise EngineError for a wrong shape or dtype.

    num_tokens: the rows that each must have.
    """
    logprobs = table(tensors, "logprobs", np.float64, 1, num_tokens)
    top_ids = table(tensors, "top_ids", np.int32, 2, num_tokens)
    top_logprobs = table(tensors, "top_logprobs", np.float64, 2, num_tokens)
    if getattr(top_ids, "shape", None) != getattr(top_logprobs, "shape", None):
        raise EngineError("top_ids and top_logprobs must have the same shape in an engine call")
    return logprobs, top_ids, top_logprobs
