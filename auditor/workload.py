"""What an audit asks: every method under every rule that takes it, at samplings of all kinds, by turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.distributions import DRAWN
from auditor.requests import AuditRequest, Options
from benchmarks.settings import inputs_of
from orchestrator.core.sampling_params import OUR_RULES, Rule

#: Of benchmarks/settings.py: chains and trees, chosen and drawn.
SETTINGS = ("none", "prompt_lookup", "ngram", "draft_model 4", "prompt_lookup branches", "suffix wide", "lookahead")
#: Those that read hidden states, which a server alone can have; their drafts are chosen trees.
HEADS = ("medusa leaves", "eagle narrow", "eagle2 small", "eagle3 small", "redrafter 2 3", "prompt_lookup+eagle2 8")
#: Those whose drafts are never more than a chain: `block` decides on nothing else.
CHAINS = ("none", "prompt_lookup", "ngram", "draft_model 4")
#: Those whose drafts are drawn from a q, and so the ones under which a rule that is wrong would leave the law.
SAMPLED_SETTINGS = ("draft_model 4", "ngram", "prompt_lookup branches")

SAMPLINGS: dict[str, Options] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 0.5, "top_k": 4, "top_p": 0.95, "min_p": 0.02},
    "penalised": {
        "temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3,
        "logit_bias_ids": [5, 9], "logit_bias_weights": [1.5, -2.0], "min_tokens": 4,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much is asked. seeds: per law; 0 leaves the distributions out. characters: of a prompt, its last ones."""

    prompts: int = 8
    tokens: int = 64
    seeds: int = 2000
    characters: int = 600


QUICK = Size(prompts=2, tokens=16, seeds=150, characters=120)


def replay_requests(prompts: Sequence[str], settings: Sequence[str], num_tokens: int) -> list[AuditRequest]:
    """Return the requests that are replayed; every one tells its steps and its log-probabilities."""
    return list(_requests(prompts, settings, num_tokens))


def _requests(prompts: Sequence[str], settings: Sequence[str], num_tokens: int) -> Iterator[AuditRequest]:
    told = {"max_tokens": num_tokens, "return_steps": True, "return_log_probs": True}
    samplings = list(SAMPLINGS)
    for index, prompt in enumerate(prompts):
        for rule_index, rule in enumerate(OUR_RULES):
            for setting_index, setting in enumerate(settings_of(rule, settings)):
                # By turns: every setting and every rule meets every sampling over a few prompts.
                name = samplings[(index + rule_index + setting_index) % len(samplings)]
                seeded = {"seed": 1 + 7 * index + setting_index, "rule": rule.value, "stream": setting_index % 2 == 0}
                options = {**inputs_of(setting, prompt), **SAMPLINGS[name], **told, **seeded}
                yield AuditRequest(f"prompt {index}, {setting}, {rule}, {name}", prompt, options)


def settings_of(rule: Rule, settings: Sequence[str]) -> list[str]:
    """Return the settings that a rule takes."""
    return [setting for setting in settings if rule is not Rule.BLOCK or setting in CHAINS]


def variants_of(index: int, prompt: str, settings: Sequence[str], num_tokens: int) -> list[AuditRequest]:
    """Return requests under `coupled` with one seed, whose texts must be the same: every method, streamed and not."""
    drawn = {"temperature": 0.9, "top_p": 0.97, "seed": 1000 + index, "max_tokens": num_tokens}
    asked = [AuditRequest(f"prompt {index}, {name}", prompt, {**inputs_of(name, prompt), **drawn}) for name in settings]
    return [
        request.but(how, stream=streams)
        for request in asked
        for streams, how in ((True, ", streamed"), (False, ", whole"))
    ]


def stopped_variants(requests: Sequence[AuditRequest], text: str) -> list[AuditRequest]:
    """Return the requests again with stop strings that the text holds: across tokens, and one that only begins."""
    middle = len(text) // 2
    word = text[middle : middle + 5]
    if not word:
        return []
    stops = [word, text[: middle // 2 + 1][-3:] + "\x00never"]
    return [request.but(", stopped", stop_words=stops, return_log_probs=True) for request in requests]


def distribution_requests(prompt: str, settings: Sequence[str]) -> list[AuditRequest]:
    """Return what the distributions are asked: every rule with drafts that can bend it."""
    return [
        AuditRequest(f"{rule}, {setting}", prompt, {**inputs_of(setting, prompt), **DRAWN, "rule": rule.value})
        for rule in OUR_RULES
        for setting in settings_of(rule, [name for name in SAMPLED_SETTINGS if name in settings])
    ]
