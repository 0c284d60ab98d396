"""The requests of an audit: every method under every rule that supports it, with samplings of all kinds in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.distributions import SAMPLED
from auditor.requests import AuditRequest, Options
from auditor.settings import inputs_of
from orchestrator.core.sampling_params import OUR_RULES, Rule

#: Settings of auditor/settings.py: chains and trees, deterministic and sampled drafts.
SETTINGS = (
    "none", "prompt_lookup", "ngram", "draft_model 4", "draft_model tree", "prompt_lookup branches", "suffix wide",
    "lookahead",
)  # fmt: skip
#: Settings whose drafters read hidden states, which only a server has; their drafts are deterministic trees.
HEADS = ("medusa leaves", "eagle narrow", "eagle2 small", "eagle3 small", "redrafter 2 3", "prompt_lookup+eagle2 8")
#: Settings whose drafts are always chains, the only trees that the rule `block` accepts.
CHAINS = ("none", "prompt_lookup", "ngram", "draft_model 4")
#: Settings whose drafts are sampled from a q: a wrong rule would change the distribution of their texts.
SAMPLED_SETTINGS = ("draft_model 4", "draft_model tree", "ngram", "prompt_lookup branches")

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
    """The size of an audit.

    seeds: draws per distribution, 0 to skip them. characters: of a prompt, only this many at its end are sent.
    """

    prompts: int = 8
    tokens: int = 64
    seeds: int = 2000
    characters: int = 600


QUICK = Size(prompts=2, tokens=16, seeds=150, characters=120)


def replay_requests(prompts: Sequence[str], settings: Sequence[str], num_tokens: int) -> Iterator[AuditRequest]:
    """Yield the requests that are replayed; each returns its steps and its log-probabilities."""
    outputs = {"max_tokens": num_tokens, "return_steps": True, "return_log_probs": True}
    samplings = list(SAMPLINGS)
    for index, prompt in enumerate(prompts):
        for rule_index, rule in enumerate(OUR_RULES):
            for setting_index, setting in enumerate(settings_of(rule, settings)):
                # In turn, so that over a few prompts every setting and every rule meets every sampling.
                name = samplings[(index + rule_index + setting_index) % len(samplings)]
                seeded = {"seed": 1 + 7 * index + setting_index, "rule": rule.value, "stream": setting_index % 2 == 0}
                options = {**inputs_of(setting, prompt), **SAMPLINGS[name], **outputs, **seeded}
                yield AuditRequest(f"prompt {index}, {setting}, {rule}, {name}", prompt, options)


def settings_of(rule: Rule, settings: Sequence[str]) -> list[str]:
    """Return the settings that a rule supports."""
    return [setting for setting in settings if rule is not Rule.BLOCK or setting in CHAINS]


def variants_of(index: int, prompt: str, settings: Sequence[str], num_tokens: int) -> list[AuditRequest]:
    """Return requests under `coupled` with one seed, whose texts must be equal: every method, streamed and whole."""
    sampling = {"temperature": 0.9, "top_p": 0.97, "seed": 1000 + index, "max_tokens": num_tokens}
    requests = [
        AuditRequest(f"prompt {index}, {name}", prompt, {**inputs_of(name, prompt), **sampling}) for name in settings
    ]
    return [
        request.but(how, stream=streams)
        for request in requests
        for streams, how in ((True, ", streamed"), (False, ", whole"))
    ]


def stopped_variants(requests: Sequence[AuditRequest], text: str) -> list[AuditRequest]:
    """Return the requests with two stop strings: one in the middle of the text, one that only begins in it."""
    middle = len(text) // 2
    word = text[middle : middle + 5]
    if not word:
        return []
    stops = [word, text[: middle // 2 + 1][-3:] + "\x00never"]
    return [request.but(", stopped", stop_words=stops, return_log_probs=True) for request in requests]


def distribution_requests(prompt: str, settings: Sequence[str]) -> list[AuditRequest]:
    """Return the requests whose distributions are tested: every rule with drafts that could distort it."""
    return [
        AuditRequest(f"{rule}, {setting}", prompt, {**inputs_of(setting, prompt), **SAMPLED, "rule": rule.value})
        for rule in OUR_RULES
        for setting in settings_of(rule, [name for name in SAMPLED_SETTINGS if name in settings])
    ]
