"""What a server says of its steps (`steps`, orchestrator/generation/trace.py), read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.core.sampling_params import Grammar, LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution
from orchestrator.sampling.accept import AcceptedPath
from orchestrator.sampling.sampled_drafts import check_q


@dataclass(frozen=True, eq=False)
class ReportedStep:
    """One step. prefix_len: tokens before the drafts. sources: what made each node. walk: what the server accepted."""

    prefix_len: int
    context_hash: int
    tree: TokenTree
    sources: tuple[str, ...]
    q: tuple[Distribution, ...]
    walk: AcceptedPath

    @property
    def tokens(self) -> list[int]:
        """What the step says."""
        return [int(self.tree.tokens[node - 1]) for node in self.walk.path] + [self.walk.next_token]


@dataclass(frozen=True, eq=False)
class ReportedSequence:
    """All steps of one sequence."""

    prompt: list[int]
    sampling: Sampling
    steps: list[ReportedStep]

    @property
    def tokens(self) -> list[int]:
        """What all steps say; the last one may go on behind the end of the output."""
        return [token for step in self.steps for token in step.tokens]


def read_steps(text: str, vocab_size: int) -> ReportedSequence:
    """Read `steps`; raises EngineError for a tree or q that breaks its law, another exception for broken JSON."""
    found = json.loads(text)
    steps = [_step(entry, vocab_size) for entry in found["steps"]]
    return ReportedSequence(found["prompt_ids"], _sampling(found["sampling"]), steps)


def _step(entry: dict[str, Any], vocab_size: int) -> ReportedStep:
    tokens, parents = (np.array(entry[name], np.int32) for name in ("node_ids", "node_parents"))
    tree = TokenTree.checked(tokens, parents, vocab_size, len(tokens))
    q = tuple(Distribution(np.array(x["ids"], np.int32), np.array(x["weights"], np.float32)) for x in entry["q"])
    check_q(tree, q, vocab_size)
    walk = AcceptedPath(tuple(entry["path"]), entry["next_token"])
    return ReportedStep(entry["prefix_len"], entry["context_hash"], tree, tuple(entry["sources"]), q, walk)


def _sampling(entry: dict[str, Any]) -> Sampling:
    logits_options = entry["logits_options"]
    read = LogitsOptions(
        bias=tuple((token, weight) for token, weight in logits_options["bias"]),
        grammar=Grammar(*logits_options["grammar"]) if logits_options["grammar"] else None,
        allowed=tuple(logits_options["allowed"]),
        bad_words=tuple(tuple(word) for word in logits_options["bad_words"]),
        end_ids=tuple(logits_options["end_ids"]),
    )
    return Sampling(**{**entry, "rule": Rule(entry["rule"]), "logits_options": read})
