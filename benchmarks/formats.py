"""`python -m benchmarks.formats FILE:DTYPE …`: what the formats of one model's weights and products cost in quality.

Perplexity and the likeliest tokens over this project's pages, in windows of 128 tokens whose second halves are scored.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.tree import TokenTree
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel
from runtime.models.load import load_model
from runtime.models.stock import read_pretrained

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 128


class Scored(NamedTuple):
    """Of every scored place: log p of its token, the likeliest token, and log p of all; (n), (n) and (n, V)."""

    log_p: Tensor
    likeliest: Tensor
    all_log_p: Tensor


def windows(target: str, count: int) -> list[list[int]]:
    """Return the first windows of the pages."""
    tokenizer = read_pretrained(AutoTokenizer, target)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

    def cut() -> Iterator[list[int]]:
        for page in pages:
            ids = tokenizer(page.read_text(encoding="utf-8"))["input_ids"]
            yield from (ids[first : first + WINDOW] for first in range(0, len(ids) - WINDOW + 1, WINDOW))

    return list(islice(cut(), count))


def score(target: str, dtype: str, texts: Sequence[Sequence[int]]) -> Scored:
    """Return the scores of the second halves of the texts."""
    paged, half, rows = (
        PagedModel(load_model(target, "cpu", dtype, kernels="native"), 64, 16, share=False),
        WINDOW // 2,
        [],
    )
    for number, ids in enumerate(texts, 1):
        tree = TokenTree.chain(list(ids[half:-1]))
        sequence = paged.sequences.open(delta_of(Context(ids[:half]), 0, number, ""), tree.num_nodes, tree.num_nodes)
        rows.append(paged.forward([Segment(sequence, 0, half, tree)]).log_softmax(dim=-1))
        paged.sequences.drop(number)
    log_p, tokens = torch.cat(rows), torch.tensor([token for ids in texts for token in ids[half:]])
    return Scored(log_p[torch.arange(len(tokens)), tokens], log_p.argmax(dim=-1), log_p)


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.add_argument("formats", nargs="+", help="checkpoint or GGUF file, colon, dtype; compared with the first")
    parser.add_argument("--windows", type=int, default=32)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    first, texts = None, windows(options.formats[0].rpartition(":")[0], options.windows)
    print(f"{len(texts) * WINDOW // 2} scored tokens\n")
    print("| format | perplexity | ÷ the first | same likeliest token | mean KL |")
    print("|---|---:|---:|---:|---:|")
    for name in options.formats:
        target, _, dtype = name.rpartition(":")
        scored = score(target, dtype, texts)
        first = first or scored
        perplexity, base = (math.exp(-each.log_p.double().mean()) for each in (scored, first))
        same = (scored.likeliest == first.likeliest).double().mean()
        divergence = (first.all_log_p.exp() * (first.all_log_p - scored.all_log_p)).sum(dim=-1).mean()
        label = f"{Path(target).name}, {dtype}"
        print(
            f"| {label} | {perplexity:.3f} | {perplexity / base:.4f} | {100 * same:.1f} % | {divergence:.4f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
