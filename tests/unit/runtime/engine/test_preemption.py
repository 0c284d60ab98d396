"""Texts under KV pressure: sequences are preempted again and again, and every text stays what it is alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from orchestrator.core.context import Context
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import StepOptions
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.sequences import SequenceTable
from runtime.engine.paged import PagedModel
from runtime.engine.thread import EngineThread
from tests.support.engines import LIMIT_S, EngineTarget, make_paged, start_target

LENGTH, NUM_TOGETHER = 40, 5
TREE = TokenTree.from_paths([[5, 6, 7], [8]])


def with_blocks(paged: PagedModel, num_blocks: int) -> PagedModel:
    """Give a model's sequences fewer blocks than its cache has."""
    pool = BlockPool(num_blocks, paged.cache.block_tokens)
    paged.sequences = SequenceTable(pool, paged.sequences.max_positions)
    return paged


def generate(engine: EngineThread, number: int, sampling: Sampling, tree: TokenTree) -> list[int]:
    """Return a text of LENGTH tokens after a prompt of its own."""
    context = Context([number, 1, 2, 3, *range(10, 16 + number)])
    target = EngineTarget(engine, number)
    while len(context) - context.prompt_len < LENGTH:
        context.commit(target.step(context, tree, sampling, StepOptions()).tokens(tree))
    target.release()
    return context.output[:LENGTH]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [TokenTree.bare(), TREE], ids=["plain", "tree"])
def test_texts_are_the_same_with_blocks_for_all_and_with_blocks_for_one(
    folder: Path, sampling: Sampling, tree: TokenTree
) -> None:
    roomy = start_target(make_paged(folder))
    expected = [generate(roomy, 1 + number, sampling, tree) for number in range(NUM_TOGETHER)]
    roomy.close()
    # The longest context and its drafts, and a block or two beyond: two sequences never fit to their ends.
    num_blocks = (20 + LENGTH + 2 * TREE.num_nodes) // 4 + 2
    engine = start_target(with_blocks(make_paged(folder), num_blocks))
    texts: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: texts.update({n: generate(engine, 1 + n, sampling, tree)}), daemon=True)
        for n in range(NUM_TOGETHER)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [texts.get(number) for number in range(NUM_TOGETHER)] == expected
    assert engine.status().num_preempted > 0, "nothing was tested"
    engine.close()
    assert engine.status().blocks_held == 0
