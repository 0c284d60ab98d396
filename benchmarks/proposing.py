"""`python -m benchmarks.proposing`: the time of `propose` and `observe` per step, by in-process method and context.

The context is real text, held-out prompts one after another; the target "generates" the rest of it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.deployment import CONFIG
from benchmarks.traffic import read_prompts
from orchestrator.core.accept import accept_coupled
from orchestrator.core.context import Context
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import load_config
from orchestrator.core.methods import METHODS, PROPOSED
from orchestrator.core.proposal import Budget, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.memory import new_memory
from orchestrator.drafting.registry import select_method
from orchestrator.drafting.tables import load_tables

SAMPLING = Sampling(0.8, seed=1)
BUDGET = Budget(128, 1000)


class Cost(NamedTuple):
    """Milliseconds of construction and the first call, which reads the whole prompt, and of the later steps."""

    first: float
    median: float
    p95: float
    most: float


def text_of(length: int, tokenizer: Any) -> list[int]:
    """Return `length` tokens of held-out text, repeated if it is shorter."""
    texts = "\n\n\n".join(prompt.text for prompts in read_prompts().values() for prompt in prompts)
    return list(itertools.islice(itertools.cycle(tokenizer.encode(texts).ids), length))


def cost_of(build: Callable[[], Proposer], ids: Sequence[int], num_prompt: int, vocab_size: int) -> Cost:
    """Return the cost of the steps that generate the rest of `ids` after the prompt."""
    context, times_ms = Context(ids[:num_prompt]), []
    began_s = time.perf_counter()
    proposer = build()
    built_ms = 1e3 * (time.perf_counter() - began_s)
    while len(context) + BUDGET.max_nodes + 1 < len(ids):
        began_s = time.perf_counter()
        tree = proposer.propose(context, SAMPLING, BUDGET).tree
        drafted_s = time.perf_counter()
        target_tokens = np.array([ids[len(context) + depth] for depth in tree.depths.tolist()], np.int32)
        accepted = accept_coupled(tree, target_tokens.tolist())
        top_ids = (target_tokens[:, None] + np.arange(8, dtype=np.int32)) % vocab_size  # the right token and any others
        acceptance = Acceptance(accepted.path, accepted.next_token, target_tokens=target_tokens, node_top_ids=top_ids)
        context.commit(acceptance.tokens(tree))
        observed_s = time.perf_counter()
        proposer.observe(tree, acceptance)
        times_ms.append(1e3 * (drafted_s - began_s + time.perf_counter() - observed_s))
    first, *later = times_ms
    return Cost(built_ms + first, statistics.median(later), statistics.quantiles(later, n=20)[-1], max(later))


def dependencies_of(config: Any, checkpoint: Any, ids: Sequence[int], num_prompt: int) -> ProposerDependencies:
    """Return the proposers' inputs: tables, a memory that holds the text once, and a correct prediction."""
    memory = new_memory(1 << 20)
    memory.learn("", ids)
    tables = load_tables(config.ngram_tables, checkpoint.tokenizer) if config.ngram_tables else None
    return ProposerDependencies(
        drafter_client=lambda name: None,  # type: ignore[arg-type, return-value]
        vocab_size=checkpoint.vocab_size,
        prediction=tuple(ids[num_prompt:]),
        tables=tables,
        memory=memory.of(""),
        num_parameters=checkpoint.num_parameters,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096], help="tokens of the prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens that follow (%(default)s)")
    options = parser.parse_args(arguments)
    config = load_config(CONFIG)
    checkpoint = read_checkpoint(config.target)
    print("| method | context | first call, ms | median, ms | 95 % | most |\n|---|---:|---:|---:|---:|---:|")
    for length in options.contexts:
        ids = text_of(length + options.tokens, checkpoint.tokenizer)
        dependencies = dependencies_of(config, checkpoint, ids, length)
        for name in (name for name in PROPOSED if not METHODS[name].drafter):
            made = select_method(name, "", frozenset(), {})
            build = functools.partial(made.proposer, dependencies)
            cost = cost_of(build, ids, length, checkpoint.vocab_size)
            print(f"| {name} | {length} | {cost.first:.1f} | {cost.median:.3f} | {cost.p95:.3f} | {cost.most:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
