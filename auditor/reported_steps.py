"""The steps that a server reports (output `steps`, orchestrator/server/step_trace.py), read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.core.accept import AcceptedPath
from orchestrator.core.sampled_drafts import check_q
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution


@dataclass(frozen=True, eq=False)
class ReportedStep:
    """One step.

    prefix_len: tokens before the drafts. sources: the proposer of each node. accepted: the server's decision.
    """

    prefix_len: int
    context_hash: int
    tree: TokenTree
    sources: tuple[str, ...]
    q: tuple[Distribution, ...]
    accepted: AcceptedPath

    @property
    def tokens(self) -> list[int]:
        """The tokens that the step emits."""
        return [int(self.tree.tokens[node - 1]) for node in self.accepted.path] + [self.accepted.next_token]


@dataclass(frozen=True, eq=False)
class ReportedSequence:
    """All steps of one sequence."""

    prompt: list[int]
    sampling: Sampling
    steps: list[ReportedStep]

    @property
    def tokens(self) -> list[int]:
        """The tokens that all steps emit; the last step may go beyond the end of the output."""
        return [token for step in self.steps for token in step.tokens]


def read_steps(text: str, vocab_size: int) -> ReportedSequence:
    """Read `steps`.

    Raises: EngineError for a tree or a q that breaks its invariant, another exception for broken JSON.
    """
    entry = json.loads(text)
    steps = [_step(step, vocab_size) for step in entry["steps"]]
    return ReportedSequence(entry["prompt_ids"], _sampling(entry["sampling"]), steps)


def _step(entry: dict[str, Any], vocab_size: int) -> ReportedStep:
    tokens, parents = (np.array(entry[name], np.int32) for name in ("node_ids", "node_parents"))
    tree = TokenTree.checked(tokens, parents, vocab_size, len(tokens))
    q = tuple(Distribution(np.array(x["ids"], np.int32), np.array(x["weights"], np.float32)) for x in entry["q"])
    check_q(tree, q, vocab_size)
    accepted = AcceptedPath(tuple(entry["path"]), entry["next_token"])
    return ReportedStep(entry["prefix_len"], entry["context_hash"], tree, tuple(entry["sources"]), q, accepted)


def _sampling(entry: dict[str, Any]) -> Sampling:
    logits = entry["logits_options"]
    options = LogitsOptions(
        bias=tuple((token, weight) for token, weight in logits["bias"]),
        grammar=Grammar(*logits["grammar"]) if logits["grammar"] else None,
        allowed=tuple(logits["allowed"]),
        bad_words=tuple(tuple(word) for word in logits["bad_words"]),
        end_ids=tuple(logits["end_ids"]),
    )
    return Sampling(**{**entry, "rule": Rule(entry["rule"]), "logits_options": options})
