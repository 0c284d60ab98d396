"""Under `coupled` 100,000 tokens of table models are the reference's, one by one; planted bugs are seen in 15,000.

A million: `python -m tests.laws`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from orchestrator.core.accept import AcceptedPath, accept_coupled
from orchestrator.core.noise import MASK32
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from runtime.engine.sampling import distribution, noise, served
from runtime.engine.verify import VerifyInput
from tests.support.pathwise import compare

NUM_TOKENS, NUM_PLANTED = 100_000, 15_000

pytestmark = pytest.mark.usefixtures("without_collector")


@pytest.mark.timeout(600)
def test_all_tokens_are_the_reference_s_whatever_was_drafted() -> None:
    found = compare(NUM_TOKENS)
    assert found.tokens >= NUM_TOKENS
    assert (found.wrong_tokens, found.wrong_paths) == (0, 0), found
    assert found.accepted > found.tokens / 2 and found.nodes > 2 * found.accepted, (
        found
    )  # much was drafted, and refused


# Planted bugs


def position_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = distribution.target_tokens
    monkeypatch.setattr(
        distribution, "target_tokens", lambda logits, places, rules: exact(logits, [at + 1 for at in places], rules)
    )


def one_position_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    same = property(lambda self: [self.prefix_len] * (self.tree.num_nodes + 1))
    monkeypatch.setattr(VerifyInput, "positions", same)


def noise_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = noise.gumbel
    monkeypatch.setattr(noise, "gumbel", lambda *key: exact(*key).bfloat16().double())


def seeds_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = distribution.target_tokens

    def bug(logits: Tensor, places: Sequence[int], rules: Sequence[Sampling]) -> list[int]:
        return exact(logits, places, [replace(rule, seed=rule.seed & MASK32) for rule in rules])

    monkeypatch.setattr(distribution, "target_tokens", bug)


def walks_stop_short_of_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is emitted then is right, since the pick is; the path alone is not."""

    def bug(tree: TokenTree, target_tokens: Sequence[int]) -> AcceptedPath:
        path = accept_coupled(tree, target_tokens).path
        if path and not tree.children[path[-1]]:
            path = path[:-1]
        return AcceptedPath(path, target_tokens[path[-1] if path else 0])

    monkeypatch.setattr(served, "accept_coupled", bug)


def first_children_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An only child is accepted unasked."""

    def bug(tree: TokenTree, target_tokens: Sequence[int]) -> AcceptedPath:
        only = list(tree.children[0].values())
        accepted = accept_coupled(tree, target_tokens)
        return accepted if len(only) != 1 or accepted.path else AcceptedPath((only[0],), target_tokens[only[0]])

    monkeypatch.setattr(served, "accept_coupled", bug)


@pytest.mark.parametrize(
    ("bug", "changes_text"),
    [
        (position_off_by_one, True),
        (one_position_for_all_nodes, True),
        (noise_in_bfloat16, True),
        (seeds_of_32_bits, True),
        (first_children_are_taken, True),
        (walks_stop_short_of_leaves, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_seen(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None], changes_text: bool
) -> None:
    monkeypatch.setattr(served, "on_cpu", lambda _: False)  # the bugs are planted into torch's functions
    bug(monkeypatch)
    found = compare(NUM_PLANTED)
    assert found.wrong_paths and bool(found.wrong_tokens) == changes_text, found
