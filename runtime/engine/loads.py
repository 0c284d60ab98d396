"""What passes computed: the loads by which their costs are learnt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from orchestrator.core.types import PassLoad
from runtime.engine.verify import VerifyResult
from runtime.kv.batch import Segment
from runtime.native.decoding import DecodedStep


def load_of(planned: Sequence[tuple[object, Segment]], results: Sequence[VerifyResult], has_prompts: bool) -> PassLoad:
    """Return the load of a pass of these segments, by the steps that it completed."""
    num_nodes = sum(segment.tree.num_nodes for _, segment in planned)
    num_steps, num_accepted = max(len(results), 1), sum(len(result.accepted.path) for result in results)
    sizes = [(segment.last - segment.first + segment.tree.num_nodes, segment.last) for _, segment in planned]
    means = 1.0 + num_nodes / num_steps, 1.0 + num_accepted / num_steps
    return PassLoad(sum(rows for rows, _ in sizes), num_steps, *means, has_prompts, *_kv_of(sizes))


def loads_of(passes: Iterable[Sequence[DecodedStep]], context_lens: list[int]) -> Iterator[PassLoad]:
    """Yield the load of each pass from the steps that all sequences made in it. context_lens: before the first one."""
    for steps in passes:
        rows, tokens = [step.draft.tree.num_nodes + 1 for step in steps], [len(step.path) + 1 for step in steps]
        means = sum(rows) / len(steps), sum(tokens) / len(steps)
        yield PassLoad(sum(rows), len(steps), *means, False, *_kv_of(zip(rows, context_lens, strict=True)))
        context_lens = [length + more for length, more in zip(context_lens, tokens, strict=True)]


def _kv_of(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the KV tokens of a pass, and those of its rows; sizes: rows and tokens of each context."""
    pairs = [*sizes]
    return sum(length for _, length in pairs), sum(rows * length for rows, length in pairs)
