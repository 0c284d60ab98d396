"""What a server says of its steps (`steps`, orchestrator/trace.py), read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.accept import Walk
from orchestrator.drawn import check_drawn
from orchestrator.sampling_params import Edits, Grammar, Rule, Sampling
from orchestrator.tree import TokenTree
from orchestrator.types import Distribution


@dataclass(frozen=True, eq=False)
class Step:
    """One step. prefix_len: tokens before the drafts. sources: what made each node. walk: what the server accepted."""

    prefix_len: int
    context_hash: int
    tree: TokenTree
    sources: tuple[str, ...]
    q: tuple[Distribution, ...]
    walk: Walk

    @property
    def tokens(self) -> list[int]:
        """What the step says."""
        return [int(self.tree.tokens[node - 1]) for node in self.walk.path] + [self.walk.next_token]


@dataclass(frozen=True, eq=False)
class Told:
    """All steps of one sequence."""

    prompt: list[int]
    sampling: Sampling
    steps: list[Step]

    @property
    def tokens(self) -> list[int]:
        """What all steps say; the last one may go on behind the end of the output."""
        return [token for step in self.steps for token in step.tokens]


def read_told(text: str, vocab_size: int) -> Told:
    """Read `steps`; raises EngineError for a tree or q that breaks its law, another exception for broken JSON."""
    found = json.loads(text)
    steps = [_step(entry, vocab_size) for entry in found["steps"]]
    return Told(found["prompt_ids"], _sampling(found["sampling"]), steps)


def _step(entry: dict[str, Any], vocab_size: int) -> Step:
    tokens, parents = (np.array(entry[name], np.int32) for name in ("node_ids", "node_parents"))
    tree = TokenTree.checked(tokens, parents, vocab_size, len(tokens))
    q = tuple(Distribution(np.array(x["ids"], np.int32), np.array(x["weights"], np.float32)) for x in entry["q"])
    check_drawn(tree, q, vocab_size)
    walk = Walk(tuple(entry["path"]), entry["next_token"])
    return Step(entry["prefix_len"], entry["context_hash"], tree, tuple(entry["sources"]), q, walk)


def _sampling(entry: dict[str, Any]) -> Sampling:
    edits = entry["edits"]
    read = Edits(
        bias=tuple((token, weight) for token, weight in edits["bias"]),
        grammar=Grammar(*edits["grammar"]) if edits["grammar"] else None,
        allowed=tuple(edits["allowed"]),
        bad_words=tuple(tuple(word) for word in edits["bad_words"]),
        end_ids=tuple(edits["end_ids"]),
    )
    return Sampling(**{**entry, "rule": Rule(entry["rule"]), "edits": read})
