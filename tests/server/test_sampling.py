"""The sampling options on the real server: every option under every method, against the reference in float64."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from auditor.reference.distribution import log_p, log_softmax, sample
from auditor.settings import SETTINGS, inputs_of
from launcher import Server
from orchestrator.core.context import Context
from orchestrator.core.grammar_matcher import Matcher
from orchestrator.core.noise import child_seed
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Grammar, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.drafting.lookup import PromptLookup, PromptLookupConfig
from tests.server.conftest import both_placements
from tests.support.clients import Stream, listed, metric, settled
from tests.support.decode import dependencies
from tests.support.surface import (
    DEMO,
    EOS,
    NUM_TOKENS,
    OPTIONS,
    REGEX,
    SCHEMA,
    Door,
    Refused,
    Said,
    Truth,
    sequences,
)
from tests.unit.orchestrator.server.generation.test_stopping import CASES, Case, table

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROMPTS = (
    "def add(first, second):\n    return first + second\n\n\ndef sub(first, second):\n    return first",
    "class Node:\n    def __init__(self, name, size):\n        self.name = name\n        self.size = ",
)
PROMPT = PROMPTS[0]
#: One setting of each method, with trees if the method has them.
METHODS = {
    "none": "none", "auto": "auto", "prompt_lookup": "prompt_lookup branches", "ngram": "ngram 2",
    "suffix": "suffix wide", "lookahead": "lookahead 2 3 2", "jacobi": "jacobi", "recycling": "recycling", "predicted": "predicted 3",
    "draft_model": "draft_model tree",
    "medusa": "medusa leaves", "eagle": "eagle narrow", "eagle2": "eagle2 small", "eagle3": "eagle3 small",
    "redrafter": "redrafter 2 3",
}  # fmt: skip
#: The settings that propose more than a chain → what the refusal calls it.
TREES = {
    "prompt_lookup branches": "branches above 1",
    "suffix wide": "tree true",
    "lookahead 2 3 2": "a window and guesses side by side",
    "recycling": "a tree",
    "draft_model tree": "top_k above 1",
    "medusa leaves": "a tree",
    "eagle narrow": "a tree",
    "eagle2 small": "a tree",
    "eagle3 small": "a tree",
    "redrafter 2 3": "a tree",
}
CHAINS = ["none", "prompt_lookup", "ngram 2", "suffix chain", "jacobi", "predicted 3", "draft_model 4"]
DRAWN = {"temperature": 0.9, "seed": 5}


#: The prompt of each option; the prompts take turns.
PROMPT_OF = {name: PROMPTS[number % 2] for number, name in enumerate(OPTIONS)}


def asked(setting: str, prompt: str = PROMPT, **inputs: Any) -> dict[str, Any]:
    """Return a request's inputs; the server's default deadline would cut a text short on a busy machine."""
    base = {"text_input": prompt, "max_tokens": NUM_TOKENS, "timeout_ms": 280_000}
    return base | inputs_of(setting, prompt) | inputs


@pytest.fixture(scope="module")
def door(shipped: Server) -> Iterator[Door]:
    opened = Door(shipped)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


# Options


def turns(number: int, every: bool) -> list[str]:
    """Return the methods that are asked for an option: all, or `none` and three others, by turns."""
    others = [method for method in METHODS if method != "none"]
    return ["none", *(others if every else (others * 2)[3 * number % len(others) :][:3])]


@pytest.fixture(scope="module")
def told(shipped: Server, door: Door) -> dict[tuple[str, str], Said]:
    """The answers to all options, sent at once so that different options share passes; in `separate` fewer methods each."""
    return door.crowd(
        {
            (name, method): asked(METHODS[method], PROMPT_OF[name], **option.inputs)
            for number, (name, option) in enumerate(OPTIONS.items())
            for method in turns(number, every="draft" not in shipped.models)
        }
    )


@both_placements
@pytest.mark.parametrize("name", OPTIONS)
def test_option_says_the_same_under_every_method_and_as_the_reference(
    told: dict[tuple[str, str], Said], truth: Truth, name: str
) -> None:
    said = {method: told[name, method] for method in METHODS if (name, method) in told}
    ids = said["none"].ids
    assert truth.says(OPTIONS[name], DEMO.encode(PROMPT_OF[name]).ids, ids) == ids
    assert {method: answer.ids for method, answer in said.items()} == dict.fromkeys(said, ids)
    assert len({(answer.text, answer.totals["finish_reason"]) for answer in said.values()}) == 1


@both_placements
def test_options_changed_the_text_so_that_something_was_at_stake(
    told: dict[tuple[str, str], Said], truth: Truth
) -> None:
    """Compared with what the same seed and temperature pick without the option."""
    changed = set()
    for name, option in OPTIONS.items():
        prompt, ids = DEMO.encode(PROMPT_OF[name]).ids, told[name, "none"].ids
        plain = Sampling(option.sampling.temperature, seed=option.sampling.seed)
        target_tokens = sample(truth.rows(prompt, ids)[:-1], len(prompt) + np.arange(len(ids)), plain)
        changed |= {name} if target_tokens.tolist() != ids else set()
    assert len(changed) >= 14, changed


@both_placements
def test_every_method_had_drafts_accepted(told: dict[tuple[str, str], Said]) -> None:
    for wanted in set(METHODS) - {"none"}:
        assert sum(s.totals["total_accepted_draft_tokens"] for (_, m), s in told.items() if m == wanted) > 0, wanted


# Log-probabilities


@pytest.fixture(scope="module")
def scored(door: Door) -> dict[tuple[str, bool], Said]:
    """The answer to every setting, streamed and not."""
    inputs = {"num_top_log_probs": 3, "repetition_penalty": 1.3, "top_k": 50, **DRAWN}
    return door.crowd({(s, t): asked(s, **inputs, stream=t) for s in METHODS.values() for t in (True, False)})


@both_placements
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("setting", METHODS.values())
def test_log_probs_are_those_of_a_plain_pass(
    scored: dict[tuple[str, bool], Said], truth: Truth, setting: str, stream: bool
) -> None:
    """1e-4 because the model computes in float32. They are the model's log-probabilities, whatever the sampling."""
    said = scored[setting, stream]
    rows = log_softmax(truth.rows(DEMO.encode(PROMPT).ids, said.ids)[:-1])
    top = np.argsort(-rows, axis=1, kind="stable")[:, :3]
    assert len(said.logprobs) == len(said.top_ids) == len(said.ids) == NUM_TOKENS
    np.testing.assert_allclose(said.logprobs, rows[range(NUM_TOKENS), said.ids], rtol=1e-4, atol=1e-4)
    assert said.top_ids == top.tolist()
    np.testing.assert_allclose(said.top_logprobs, np.take_along_axis(rows, top, 1), rtol=1e-4, atol=1e-4)
    assert said.totals["cum_log_probs"] == pytest.approx(sum(said.logprobs), rel=1e-5)


def test_return_log_probs_alone_brings_no_others(door: Door) -> None:
    said = door.ask(**asked("none", return_log_probs=True, max_tokens=3))
    assert len(said.logprobs) == 3 and not said.top_ids


# Structured output

GUIDED_PROMPT = (
    'pairs = [\n    {"name": "left", "size": 22},\n    {"name": "up-1", "size": 333},\n    # right-22; up-1\n    '
)
GUIDES = {"json_schema": SCHEMA, "regex": REGEX}


def guided(kind: str, setting: str, **inputs: Any) -> dict[str, Any]:
    guide = {"guided_decoding_guide_type": kind, "guided_decoding_guide": GUIDES[kind]}
    return asked(setting, GUIDED_PROMPT, max_tokens=96, **{**guide, "temperature": 0.7, "seed": 4, **inputs})


def check_matches(kind: str, said: Said) -> None:
    """Check by hand, not with the code that made it."""
    assert said.totals["finish_reason"] == "stop" and said.ids[-1] == EOS
    if kind == "regex":
        assert re.fullmatch(REGEX, said.text)
        return
    value = json.loads(said.text)
    assert list(value) == ["name", "size"] and len(value["name"]) <= 4 and value["size"] in (1, 22, 333)


@both_placements
@pytest.mark.parametrize("kind", GUIDES)
def test_structured_output_matches_ends_itself_and_is_the_same_text(door: Door, kind: str) -> None:
    said = door.crowd({setting: guided(kind, setting) for setting in METHODS.values()})
    for answer in said.values():
        check_matches(kind, answer)
    assert len({tuple(answer.ids) for answer in said.values()}) == 1


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
def test_structured_output_matches_under_every_rule(door: Door, rule: str) -> None:
    kinds = dict(zip(CHAINS, [*GUIDES] * len(CHAINS), strict=False))  # by turns
    said = door.crowd({(k, s): guided(k, s, rule=rule, temperature=1.0) for s, k in kinds.items()})
    for (kind, _), answer in said.items():
        check_matches(kind, answer)


def steps_of(said: Said, matcher: Matcher) -> Iterator[tuple[Context, TokenTree, int]]:
    """Yield the context before each step, its tree, and how many of its nodes the grammar allows."""
    told = json.loads(said.totals["steps"])
    prompt_len, ids = len(told["prompt_ids"]), told["prompt_ids"] + said.ids
    for step in told["steps"]:
        context = Context(told["prompt_ids"])
        context.commit(ids[prompt_len : step["prefix_len"]])
        matcher.follow(context.output)
        tree = TokenTree(np.array(step["node_ids"], np.int32), np.array(step["node_parents"], np.int32))
        yield context, tree, len(matcher.legal_nodes(tree))


@both_placements
@pytest.mark.parametrize("setting", METHODS.values())
def test_drafts_that_the_grammar_forbids_are_left_out(door: Door, truth: Truth, setting: str) -> None:
    said = door.ask(**guided("json_schema", setting, return_steps=True))
    matcher = truth.grammars.matcher(Grammar("json_schema", SCHEMA), [EOS])
    counts = [(tree.num_nodes, legal) for _, tree, legal in steps_of(said, matcher)]
    if SETTINGS[setting][0] in ("lookahead", "jacobi"):  # they learn from the target's tokens at all their nodes
        assert any(legal < nodes for nodes, legal in counts)
    else:
        assert all(legal == nodes for nodes, legal in counts)


def test_pruned_prompt_lookup_drafts_fewer_tokens_and_loses_none_that_is_accepted(door: Door, truth: Truth) -> None:
    said = door.ask(**guided("json_schema", "prompt_lookup", return_steps=True, temperature=0.0))
    matcher = truth.grammars.matcher(Grammar("json_schema", SCHEMA), [EOS])
    whole, accepted = 0, 0
    for context, _, _ in steps_of(said, matcher):
        tree = PromptLookup(PromptLookupConfig(), dependencies()).propose(context, Sampling(), Budget(128, 128)).tree
        rest = said.ids[len(context.output) :]
        whole += tree.num_nodes
        accepted += next((n for n, pair in enumerate(zip(tree.tokens, rest, strict=False)) if pair[0] != pair[1]), 0)
    assert 0 < said.totals["total_draft_tokens"] < whole
    assert said.totals["total_accepted_draft_tokens"] >= accepted > 0


HOSTILE = {
    "deep": ("json_schema", "[" * 50_000, "recursion"),
    "nothing matches": ("json_schema", "false", "the guide "),
    "empty class": ("regex", r"[^\s\S]", "not a regex that an output can match"),
    "unknown type": ("jsn", "", "did you mean 'json'?"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_guide_is_refused_in_one_sentence_and_the_server_goes_on(door: Door, case: str) -> None:
    kind, guide, words = HOSTILE[case]
    with pytest.raises(Refused, match=re.escape(words)) as caught:
        door.ask(**asked("none", guided_decoding_guide_type=kind, guided_decoding_guide=guide))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert len(door.ask(**asked("none", max_tokens=1)).ids) == 1


@pytest.mark.parametrize("guide", ["(a{1,1000}){1,1000}{1,1000}", "((((((a*)*)*)*)*)*)*", "(a|aa|aaa)*" * 50])
def test_regex_that_explodes_is_cut_like_any_text_or_refused_and_the_server_goes_on(door: Door, guide: str) -> None:
    try:
        said = door.ask(**asked("draft_model 4", guided_decoding_guide_type="regex", guided_decoding_guide=guide))
        assert len(said.ids) <= NUM_TOKENS and set(said.text) <= {"a"}
    except Refused as refusal:
        assert "too many expressions constructed" in str(refusal) and len(str(refusal)) < 500
    assert len(door.ask(**asked("none", max_tokens=1)).ids) == 1


# Several sequences


@pytest.mark.parametrize("number", [1, 3])
def test_returned_sequences_are_those_of_requests_with_child_seeds_over_every_door(door: Door, number: int) -> None:
    inputs = {**DRAWN, "max_tokens": 8, "num_top_log_probs": 2, "num_return_sequences": number}
    alone = {i: asked("none", **{**inputs, "seed": child_seed(5, i), "num_return_sequences": 1}) for i in range(number)}
    expected = list(door.crowd(alone).values())
    streamed = door.parts(**asked("draft_model 4", **inputs, stream=True))
    whole, unary = door.parts(**asked("suffix", **inputs)), door.unary(**asked("lookahead", **inputs))
    assert all(("sequence_index" in part) == (number > 1) for part in streamed)
    assert len(whole) == 1 and len(streamed) > number
    for parts in (streamed, whole, [unary]):
        for got, right in zip(sequences(parts), expected, strict=True):
            assert (got.text, got.ids, got.logprobs) == (right.text, right.ids, right.logprobs)
            assert (got.top_ids, got.totals["finish_reason"]) == (right.top_ids, right.totals["finish_reason"])
    for part in (whole[0], unary):
        assert part["num_output_tokens"].shape == part["cum_log_probs"].shape == (1, number)
        assert part["text_output"].shape == ((1, number) if number > 1 else (1,))
    body = door.http(**asked("jacobi", **inputs)).body
    assert listed(body["text_output"]) == [said.text for said in expected]
    assert body["output_ids"] == [token for said in expected for token in said.ids]


def test_sequences_of_one_request_differ(door: Door) -> None:
    texts = [said.text for said in sequences(door.parts(**asked("none", **DRAWN, num_return_sequences=4)))]
    assert len(set(texts)) == 4


@pytest.mark.parametrize("number", [17, -1])
def test_number_of_sequences_beyond_the_limit_is_refused(door: Door, number: int) -> None:
    with pytest.raises(Refused, match=rf"num_return_sequences must be in 0\.\.16, got {number}"):
        door.parts(**asked("none", num_return_sequences=number))
    assert door.http(**asked("none", num_return_sequences=number)).status == 400


ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "num_return_sequences": 4}


@pytest.mark.parametrize("stream", [True, False])
def test_deadline_ends_all_sequences_with_what_they_have(door: Door, stream: bool) -> None:
    said = sequences(door.parts(**asked("none", **ENDLESS, timeout_ms=200, stream=stream)))
    assert [answer.totals["finish_reason"] for answer in said] == ["deadline"] * 4
    assert all(len(answer.ids) < 1500 for answer in said)


def test_cancelling_a_request_ends_all_its_sequences(shipped: Server, door: Door) -> None:
    def steps() -> float:
        return metric(shipped.metrics_url, "nv_inference_count", model="target")

    with Stream(shipped.grpc_url) as stream:
        stream.send(**asked("none", **ENDLESS, stream=True))
        assert {stream.receive().values["sequence_index"] for _ in range(12)} <= {0, 1, 2, 3}
        stream.cancel()
    settled(steps, "the steps to end")
    alone = door.ask(**asked("none", return_stats=True))
    assert json.loads(alone.totals["stats"])["requests_per_pass"] == 1.0


# Rules


@both_placements
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rule_gives_one_text_a_seed_under_every_method_that_it_takes(door: Door, rule: str) -> None:
    settings = CHAINS if rule == "block" else [*CHAINS, *TREES]
    jobs = {(s, t): asked(s, **DRAWN, rule=rule, max_tokens=10) for s in settings for t in (1, 2)}
    said = door.crowd(jobs)
    for setting in settings:
        assert said[setting, 1].ids == said[setting, 2].ids, setting
        assert said[setting, 1].totals["rule"] == rule and said[setting, 1].totals["finish_reason"] == "length"
    assert said["draft_model 4", 1].totals["total_accepted_draft_tokens"] > 0
    assert said["none", 1].ids != door.ask(**asked("none", **DRAWN, max_tokens=10)).ids


@pytest.mark.parametrize("setting", TREES)
def test_block_refuses_trees_before_anything_is_generated(door: Door, setting: str) -> None:
    method = SETTINGS[setting][0]
    words = f"rule 'block' decides on chains alone, and the method '{method}' has {TREES[setting]}; use the rule"
    with pytest.raises(Refused, match=re.escape(words)):
        door.parts(**asked(setting, rule="block", stream=True))


@both_placements
@pytest.mark.parametrize(("setting", "rule"), [
    ("none", "rejection"), ("draft_model 4", "rejection"), ("draft_model tree", "rejection"), ("draft_model 4", "block"),
])  # fmt: skip
def test_first_token_has_the_target_s_law_under_every_lossless_rule(
    door: Door, truth: Truth, setting: str, rule: str
) -> None:
    """The seeds are fixed, and so are the counts: there is no luck."""
    inputs = {"temperature": 1.0, "top_k": 4, "max_tokens": 2, "num_return_sequences": 16, "rule": rule}
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda seed: door.parts(**asked(setting, **inputs, seed=seed)), range(4))
        firsts = Counter(said.ids[0] for some in parts for said in sequences(some))
    p = np.exp(log_p(truth.rows(DEMO.encode(PROMPT).ids, [])[:1], Sampling(1.0, top_k=4))[0])
    assert set(firsts) <= set(np.flatnonzero(p).tolist())
    tokens = np.flatnonzero(p).tolist()
    assert chisquare([firsts[t] for t in tokens], 64 * p[tokens]).pvalue > 1e-3


def test_use_draft_logits_asks_for_rejection(door: Door) -> None:
    flag = door.ask(**asked("draft_model 4", **DRAWN, use_draft_logits=True))
    assert flag.ids == door.ask(**asked("draft_model 4", **DRAWN, rule="rejection")).ids
    assert flag.totals["rule"] == "rejection"


def test_lossy_rule_is_labelled_and_its_thresholds_count(door: Door) -> None:
    said = [
        [
            door.ask(**asked("prompt_lookup", prompt, temperature=0.9, seed=seed, rule="typical", **thresholds))
            for prompt in PROMPTS
            for seed in range(4)
        ]
        for thresholds in (
            {"typical_epsilon": 0.0, "typical_delta": 0.0},
            {"typical_epsilon": 0.09, "typical_delta": 0.3},
            {"typical_epsilon": 1.0, "typical_delta": 1.0},
        )
    ]
    totals = [[answer.totals for answer in answers] for answers in said]
    assert {each["rule"] for some in totals for each in some} == {"typical (lossy)"}
    accepted = [
        sum(each["total_accepted_draft_tokens"] for each in some) / sum(each["num_steps"] for each in some)
        for some in totals
    ]
    assert accepted[0] > accepted[2]


# Ends over the wire


def forcing(case: Case) -> dict[str, Any]:
    """Return inputs that force the model to generate the tokens of a row in order, each once."""
    weights = [600.0 - 30.0 * place for place in range(len(case.ids))]
    order = {"logit_bias_ids": case.ids, "logit_bias_weights": weights, "allowed_token_ids": case.ids}
    once = {"presence_penalty": 100.0, "frequency_penalty": 100.0, "ignore_eos": True}
    ends = {"stop_ids": sorted(case.stop_ids), "stop_words": list(case.words)}
    return {**order, **once, **ends, "max_tokens": case.max_tokens, "min_tokens": case.min_tokens}


#: The rows whose tokens can be forced: each occurs once, and no stop id before min_tokens, where it is forbidden.
FORCED = [
    name for name, case in CASES.items()
    if len({*case.ids}) == len(case.ids) and not case.outside and case.min_tokens <= case.max_tokens
    and not case.stop_ids.intersection(case.ids[: case.min_tokens])
]  # fmt: skip


@pytest.fixture(scope="module")
def ended(door: Door) -> dict[str, Said]:
    """The answers to the rows, streamed; the methods take turns."""
    settings = [*METHODS.values()] * len(FORCED)
    return door.crowd(
        {row: asked(s, **forcing(CASES[row]), stream=True) for row, s in zip(FORCED, settings, strict=False)}
    )


def test_most_rows_of_the_table_are_forced() -> None:
    assert len(FORCED) >= 25


@pytest.mark.parametrize("name", FORCED)
def test_output_ends_as_docs_stopping_says(ended: dict[str, Said], name: str) -> None:
    """The joined deltas are the text, so no delta contained a part of the stop word."""
    said, row = ended[name], dict(table())[name]
    assert (said.text, len(said.ids), said.totals["finish_reason"]) == (row.text, row.num_tokens, row.reason)
    assert said.ids == CASES[name].ids[: row.num_tokens]
