"""Bugs to plant into the served code, which do not reach the reference that judges it.

Most were bugs of other servers (docs/auditor.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Rule
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution, DraftResponse
from orchestrator.server.text import StopFilter
from runtime.engine import draft, target, verify
from runtime.engine.kv.cache import KVCache
from runtime.engine.sampling import accept, distribution, noise, served
from runtime.engine.sampling.logits_processors import TokenCounts
from runtime.models.heads.engines import levels

Patch = pytest.MonkeyPatch


def only_torch(patch: Patch) -> None:
    """Remove the native functions, so that torch's, which give the same bits, are used: the bug is planted there."""
    patch.setattr(served, "on_cpu", lambda _: False)


def noise_reused_for_recovery(patch: Patch) -> None:
    only_torch(patch)
    sound = noise.draw
    patch.setattr(accept, "draw", lambda rows, key, at, stream, epoch: sound(rows, key, at, Stream.DRAFT, epoch))


def recovery_from_p(patch: Patch) -> None:
    only_torch(patch)
    patch.setattr(accept, "_residual", lambda p, q: p)


def replace_rule(patch: Patch, name: str, bug: Callable[..., Tensor]) -> None:
    only_torch(patch)
    sound = getattr(accept, name)
    patch.setattr(accept, "_RULES", tuple((mine, bug if rule is sound else rule) for mine, rule in accept._RULES))


def residual_not_renormalised(patch: Patch) -> None:
    def bug(p: Tensor, nodes: Any, inputs: Any) -> Tensor:
        probabilities = p[nodes.parents, nodes.tokens]
        p[nodes.parents, nodes.tokens] = 0.0
        return probabilities

    replace_rule(patch, "_deterministic", bug)


def sibling_not_removed(patch: Patch) -> None:
    sound = accept._deterministic
    replace_rule(patch, "_deterministic", lambda p, nodes, inputs: sound(p.clone(), nodes, inputs))


def token_chances_in_block(patch: Patch) -> None:
    sound = accept._block

    def bug(p: Tensor, nodes: Any, inputs: Any) -> Tensor:
        probabilities = accept._sampled(p.clone(), nodes, inputs)
        sound(p, nodes, inputs)
        return probabilities

    replace_rule(patch, "_block", bug)


def block_noise_by_position_alone(patch: Patch) -> None:
    only_torch(patch)
    uniform, draw = noise.uniform, noise.draw
    patch.setattr(accept, "uniform", lambda key, at, number, stream, epoch: uniform(key, at, number, stream, 0))
    patch.setattr(accept, "draw", lambda rows, key, at, stream, epoch: draw(rows, key, at, stream, epoch * 0))


def bonus_from_the_wrong_node(patch: Patch) -> None:
    only_torch(patch)
    sound = accept._paths

    def bug(inputs: Any, values: Any) -> Any:
        paths, ends = sound(inputs, values)
        return paths, ends - np.array([bool(path) for path in paths])

    patch.setattr(accept, "_paths", bug)


def siblings_count_as_said(patch: Patch) -> None:
    sound = TokenCounts.along

    def bug(self: TokenCounts, paths: Sequence[Sequence[int]]) -> Any:
        return sound(self, [[token for path in paths for token in path]] * len(paths))

    patch.setattr(TokenCounts, "along", bug)


def nothing_held_back(patch: Patch) -> None:
    patch.setattr(StopFilter, "_possible_stop", lambda self: 0)


def position_off_by_one(patch: Patch) -> None:
    only_torch(patch)
    sound = distribution.target_tokens
    patch.setattr(
        distribution,
        "target_tokens",
        lambda logits, positions, samplings: sound(logits, [position + 1 for position in positions], samplings),
    )


def u_may_be_0(patch: Patch) -> None:
    patch.setattr(noise, "unit", lambda bits: bits.double() * 2.0**-52)


def u_may_be_1(patch: Patch) -> None:
    patch.setattr(noise, "unit", lambda bits: (bits.double() + 1.0) * 2.0**-52)


def answer_of_drafter(patch: Patch, bug: Callable[[DraftResponse], DraftResponse]) -> None:
    sound = draft._drafted
    patch.setattr(draft, "_drafted", lambda call: bug(sound(call)))


def q_of_another_step(patch: Patch) -> None:
    answer_of_drafter(patch, lambda drafted: drafted._replace(q=(*drafted.q[1:], *drafted.q[:1])))


def q_renormalised_wrongly(patch: Patch) -> None:
    flat = lambda q: Distribution(q.ids, np.sqrt(q.weights))  # noqa: E731
    answer_of_drafter(patch, lambda drafted: drafted._replace(q=tuple(map(flat, drafted.q))))


def drafts_with_the_target_s_noise(patch: Patch) -> None:
    sound = draft.sample_draft
    patch.setattr(
        draft, "sample_draft", lambda q, at, asked, step: sound(q, at, replace(asked, rule=Rule.COUPLED), step)
    )


def drafts_left_out_by_value(patch: Patch) -> None:
    def bug(drafted: DraftResponse) -> DraftResponse:
        likeliest = [int(q.ids[q.weights.argmax()]) for q in drafted.q[:1]]
        return drafted if drafted.tree.tokens[:1].tolist() == likeliest else DraftResponse(TokenTree.bare())

    answer_of_drafter(patch, bug)


def siblings_sampled_a_position_later(patch: Patch) -> None:
    sound = levels.sampled_children
    patch.setattr(levels, "sampled_children", lambda q, position, *others: sound(q, position + 1, *others))


def rows_not_moved(patch: Patch) -> None:
    patch.setattr(KVCache, "move", lambda self, sources, targets: None)


def logprobs_after_temperature(patch: Patch) -> None:
    sound = served.log_probs_of
    patch.setattr(served, "log_probs_of", lambda logits, tokens: sound(logits / 0.8, tokens))


def noise_by_row(patch: Patch) -> None:
    only_torch(patch)
    sound = distribution.target_tokens
    patch.setattr(
        distribution,
        "target_tokens",
        lambda logits, positions, samplings: sound(
            logits, positions, [replace(sampling, seed=sampling.seed + row) for row, sampling in enumerate(samplings)]
        ),
    )


def logits_rounded(patch: Patch) -> None:
    sound = verify.verify
    patch.setattr(target, "verify", lambda inputs, logits: sound(inputs, [(rows / 4).round() * 4 for rows in logits]))


DRAWN, TREES = ("draft_model 4",), ("prompt_lookup branches", "suffix wide")
COUPLED, REJECTION, BLOCK = (f"replay, {rule}" for rule in ("coupled", "rejection", "block"))


class PlantedBug(NamedTuple):
    """A bug, the part of the audit that must find it, and the findings: (check, what). prompts: how many are sent."""

    bug: Callable[[Patch], None]
    phase: str
    settings: tuple[str, ...]
    found: set[tuple[str, str]]
    prompts: int = 2


PLANTED = [
    PlantedBug(noise_reused_for_recovery, "replays", DRAWN, {(REJECTION, "decision"), (BLOCK, "decision")}),
    PlantedBug(recovery_from_p, "replays", DRAWN, {(REJECTION, "decision"), (BLOCK, "decision")}),
    PlantedBug(residual_not_renormalised, "replays", TREES, {(REJECTION, "decision")}, prompts=8),
    PlantedBug(sibling_not_removed, "replays", TREES, {(REJECTION, "decision")}),
    PlantedBug(token_chances_in_block, "replays", DRAWN, {(BLOCK, "decision")}, prompts=8),
    PlantedBug(block_noise_by_position_alone, "replays", DRAWN, {(BLOCK, "decision")}),
    PlantedBug(bonus_from_the_wrong_node, "replays", DRAWN, {(REJECTION, "decision"), (BLOCK, "decision")}),
    PlantedBug(siblings_count_as_said, "replays", TREES, {(REJECTION, "decision")}),
    PlantedBug(
        nothing_held_back, "invariance", ("none",), {("text, stopped", "text"), ("text, stopped", "stop string")}
    ),
    PlantedBug(position_off_by_one, "replays", DRAWN, {(COUPLED, "decision")}),
    PlantedBug(q_of_another_step, "replays", DRAWN, {(REJECTION, "drafts sampled from q")}),
    PlantedBug(q_renormalised_wrongly, "replays", DRAWN, {(REJECTION, "drafts sampled from q")}),
    PlantedBug(drafts_with_the_target_s_noise, "replays", DRAWN, {(REJECTION, "drafts sampled from q")}),
    PlantedBug(
        siblings_sampled_a_position_later, "replays", ("draft_model tree",), {(REJECTION, "drafts sampled from q")}
    ),
    PlantedBug(rows_not_moved, "replays", (*TREES, "draft_model tree"), {(COUPLED, "decision")}),
    PlantedBug(logprobs_after_temperature, "replays", ("none",), {("log-probs", "log-prob")}),
    PlantedBug(noise_by_row, "invariance", ("none", "draft_model 4"), {("invariance", "invariance")}),
    PlantedBug(logits_rounded, "replays", ("none",), {("greedy", "greedy"), (COUPLED, "decision")}),
]
