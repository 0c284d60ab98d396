"""Methods by name: their parameters, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any, Literal, get_args, get_origin

import pytest

from auditor.settings import SETTINGS
from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.methods import DRAFTERS, METHODS, PROPOSED
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import DraftResponse, HeadInput
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.parameters import MethodConfig
from orchestrator.drafting.registry import SelectedMethod, load, select_method

LOADED = frozenset(DRAFTERS)
DRAFT_SAMPLING = {"draft_temperature": None, "draft_top_k": None, "draft_top_p": None}
HEAD = {"max_nodes": 24, "min_prob": None, "draws": True, "sharpness": None, **DRAFT_SAMPLING}
DEFAULTS = {
    "none": {"max_nodes": 128},
    "prompt_lookup": {
        "max_nodes": 128,
        "max_ngram": 3,
        "draft_len": 20,
        "match": "recent",
        "branches": 1,
        "length": "grown",
        "clip": False,
    },
    "lookahead": {"max_nodes": 128, "window": 0, "ngram": 0, "guesses": 0, "pool_from_prompt": True, "fill": "prompt"},
    "jacobi": {"max_nodes": 128, "draft_len": 3, "fill": "prompt"},
    "recycling": {"max_nodes": 4, "choices": TokenTree.bare(), "from_prompt": True},
    "ngram": {"max_nodes": 128, "order": 4, "draft_len": 2} | DRAFT_SAMPLING,
    "auto": {"max_nodes": 48, "draft_len": 128, "tree": True},
    "suffix": {"max_nodes": 128, "max_depth": 24, "factor": 1.5, "min_prob": 0.1, "draft_len": 32, "tree": True},
    "predicted": {"max_nodes": 128, "draft_len": 16, "max_ngram": 6},
    "draft_model": {"max_nodes": 128, "draft_len": 5, "top_k": 1, "min_prob": None, "sharpness": None, "draws": True}
    | DRAFT_SAMPLING,
    "medusa": HEAD | {"choices": TokenTree.bare()},
    "eagle": HEAD | {"choices": TokenTree.bare()},
    "eagle2": HEAD | {"top_k": 6, "depth": 10},
    "eagle3": HEAD | {"top_k": 6, "depth": 10},
    "redrafter": HEAD | {"beams": 5, "beam_len": 5},
}


def refusal(
    method: str, config: Any = "", aliases: dict[str, int] | None = None, loaded: frozenset[str] = LOADED
) -> str:
    with pytest.raises(RequestError) as caught:
        select_method(method, config if isinstance(config, str) else json.dumps(config), loaded, aliases or {})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def test_each_declaration_names_a_proposer_of_that_name_and_its_parameters() -> None:
    for name, method in METHODS.items():
        for declared in filter(None, (method.config, method.engine_config)):
            assert issubclass(load(declared), MethodConfig), name
        proposer = load(method.proposer) if method.proposer else None
        assert proposer is None or getattr(proposer, "name", name) == name
    assert set(PROPOSED) == set(METHODS) - {"mtp", "pard", "dflash"} and all(
        METHODS[name].engine_config for name in ("mtp", "pard", "dflash", "none")
    )


@pytest.mark.parametrize("method", PROPOSED)
def test_plan_without_a_config_has_the_protocol_s_defaults(method: str) -> None:
    for text in ("", "{}", " {\n} "):
        made = select_method(method, text, LOADED, {})
        assert made.method == method
        assert dict(made.config) == DEFAULTS[method]


def keys_of(kind: object) -> list[tuple[str, str]]:
    """Every parameter of a kind, as (method, key)."""
    return [
        (method, key)
        for method in PROPOSED
        for key, field in load(METHODS[method].config).model_fields.items()
        if kind in (field.annotation, get_origin(field.annotation))
    ]


def bounds_of(method: str, key: str) -> list[Any]:
    """The smallest and the largest value of a parameter."""
    rules = load(METHODS[method].config).model_fields[key].metadata
    return [getattr(rule, name) for name in ("ge", "le") for rule in rules if hasattr(rule, name)]


def accepted(method: str, key: str, value: Any) -> Any:
    return getattr(select_method(method, json.dumps({key: value}), LOADED, {}).config, key)


@pytest.mark.parametrize(("method", "key"), keys_of(int))
def test_plan_whole_number_has_its_range(method: str, key: str) -> None:
    low, high = bounds_of(method, key)
    assert [accepted(method, key, value) for value in (low, high)] == [low, high]
    for bad in (low - 1, high + 1, 1.0, True, False, "3", None, [], 10**30):
        said = refusal(method, {key: bad})
        assert said == f"{key} must be an integer in {low}..{high}, got {bad!r} (input speculation_config)"


@pytest.mark.parametrize(("method", "key"), keys_of(float))
def test_plan_number_has_its_range(method: str, key: str) -> None:
    low, high = bounds_of(method, key)
    assert [accepted(method, key, value) for value in (low, high)] == [low, high]
    for bad in (low - 1, high + 1, math.nan, math.inf, True, "3", None, []):
        said = refusal(method, {key: bad})
        assert said == f"{key} must be a number in {low:g}..{high:g}, got {bad!r} (input speculation_config)"


@pytest.mark.parametrize(("method", "key"), keys_of(Literal))
def test_plan_word_is_one_of_those_allowed(method: str, key: str) -> None:
    allowed = get_args(load(METHODS[method].config).model_fields[key].annotation)
    assert tuple(accepted(method, key, word) for word in allowed) == allowed
    for bad in ("", allowed[0].upper(), 3, None, True, [allowed[0]], {}):
        said = refusal(method, {key: bad})
        assert said == f"{key} must be one of {', '.join(allowed)}, got {bad!r} (input speculation_config)"


@pytest.mark.parametrize(("method", "key"), keys_of(bool))
def test_plan_flag_is_true_or_false(method: str, key: str) -> None:
    assert [accepted(method, key, value) for value in (True, False)] == [True, False]
    for bad in (0, 1, "true", None, []):
        assert refusal(method, {key: bad}) == f"{key} must be true or false, got {bad!r} (input speculation_config)"


def test_plan_unknown_method_names_the_nearest_and_all() -> None:
    said = refusal("draftmodel")
    assert "unknown method 'draftmodel'; did you mean 'draft_model'?" in said
    assert f"(allowed: {', '.join(sorted(PROPOSED))}; input speculation)" in said
    assert "did you mean" not in refusal("xyz")
    assert "'x" in refusal("x" * 100_000)


@pytest.mark.parametrize("method", ["PROMPT_LOOKUP", " none", "none ", "+prompt_lookup", "suffix-tree", "\x00"])
def test_plan_method_is_taken_by_its_exact_name(method: str) -> None:
    assert "unknown method" in refusal(method)


def test_plan_unknown_key_names_the_nearest_and_all() -> None:
    said = refusal("prompt_lookup", {"ngram": 3})
    assert "unknown key of prompt_lookup 'ngram'; did you mean 'max_ngram'?" in said
    assert "(allowed: branches, clip, draft_len, length, match, max_ngram, max_nodes; input speculation_config)" in said
    assert "unknown key of none 'draft_len'" in refusal("none", {"draft_len": 3})


@pytest.mark.parametrize(
    "text", ["{", "draft_len=3", "{'draft_len': 3}", '{"draft_len": }', "\x00", "{" * 9, "[" * 100_000]
)
def test_plan_malformed_json_is_refused_as_such(text: str) -> None:
    assert refusal("prompt_lookup", text).startswith("input speculation_config is not JSON: ")


@pytest.mark.parametrize(
    ("text", "kind"), [("[]", "list"), ("3", "int"), ('"draft_len"', "str"), ("null", "NoneType"), ("true", "bool")]
)
def test_plan_json_that_is_no_object_is_refused(text: str, kind: str) -> None:
    assert refusal("prompt_lookup", text) == f"input speculation_config must be a JSON object, got {kind}"


def test_plan_long_value_is_not_echoed_whole() -> None:
    refusal("prompt_lookup", {"draft_len": "9" * 100_000})
    refusal("prompt_lookup", {"x" * 100_000: 3})


def test_plan_alias_gives_the_key_where_the_method_has_it_and_the_json_goes_before() -> None:
    aliases = {"draft_len": 7}
    assert select_method("draft_model", "", LOADED, aliases).config.draft_len == 7  # type: ignore[attr-defined]
    assert select_method("draft_model", '{"draft_len": 2}', LOADED, aliases).config.draft_len == 2  # type: ignore[attr-defined]
    assert select_method("none", "", LOADED, aliases).config.max_nodes == MAX_NODES


def test_plan_drafter_that_is_not_loaded_is_refused_with_its_key() -> None:
    said = refusal("draft_model", loaded=frozenset())
    assert said == (
        "method 'draft_model' needs the drafter 'draft', which this server has not loaded (key draft in the deployment file)"
    )
    for method in ("none", "prompt_lookup"):
        select_method(method, "", frozenset(), {})


def test_plan_proposer_is_the_method_s_and_keeps_its_parameters() -> None:
    context, budget = Context([5, 6, 7, 8, 5, 6]), Budget(99, 99)
    lookup = select_method("prompt_lookup", '{"draft_len": 3, "max_ngram": 1}', LOADED, {}).proposer(
        ProposerDependencies(no_lines, 64)
    )
    assert lookup.name == "prompt_lookup"
    assert lookup.propose(context, Sampling(), budget).tree.tokens.tolist() == [7, 8, 5]
    assert (
        select_method("none", "", LOADED, {})
        .proposer(ProposerDependencies(no_lines, 64))
        .propose(context, Sampling(), budget)
        .tree.num_nodes
        == 0
    )
    line = ScriptedLine()
    draft = select_method("draft_model", '{"draft_len": 3}', LOADED, {}).proposer(
        ProposerDependencies(lambda name: line if name == "draft" else no_lines(name), 64)
    )
    assert draft.propose(context, Sampling(), Budget(99, 2)).tree.num_nodes == 2
    assert draft.propose(context, Sampling(), budget).tree.num_nodes == 3
    assert draft.propose(context, Sampling(), Budget(99, 0)).tree.num_nodes == 0
    draft.close()
    assert line.asked == [Budget(2, 2), Budget(3, 3)] and line.closed


class ScriptedLine:
    """A line to a drafter that always has an idea."""

    has_given_up = False
    use = None

    def __init__(self) -> None:
        self.asked: list[Budget] = []
        self.closed = False

    def propose(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput) -> DraftResponse:
        self.asked.append(budget)
        return DraftResponse(TokenTree.chain([1] * budget.max_depth))

    def close(self) -> None:
        self.closed = True


def no_lines(name: str) -> Any:
    raise AssertionError(f"this method asks no drafter, but wanted {name}")


@pytest.mark.parametrize(("name", "method", "values"), [(name, *setting) for name, setting in SETTINGS.items()])
def test_a_plan_s_parameters_are_the_same_behind_the_json_that_a_run_begins_with(
    name: str, method: str, values: dict[str, Any]
) -> None:
    plan = select_method(method, json.dumps(values), LOADED, {})
    again = select_method(method, plan.config_json, LOADED, {})
    for one, other in zip((plan, *plan.members), (again, *again.members), strict=True):
        assert comparable(one) == comparable(other), name


def comparable(plan: SelectedMethod) -> dict[str, Any]:
    """Return the parameters of a plan; a tree as its paths."""
    values = plan.config.__dict__
    return {key: value.paths if isinstance(value, TokenTree) else value for key, value in values.items()}


@pytest.mark.parametrize("values", [{"adaptive": True}, {"adaptive": "shared"}, {"adaptive": False, "draft_len": 3}])
def test_adaptive_is_refused_with_its_successors(values: dict[str, Any]) -> None:
    said = refusal("draft_model", values)
    assert said.startswith('adaptive is no longer a parameter: set draft_len or max_nodes to "auto"')
    assert "draft_max_sequences" in said


def test_a_size_may_be_auto_where_drafts_can_be_cut() -> None:
    plan = select_method("draft_model", '{"draft_len": "auto"}', LOADED, {})
    assert plan.config.draft_len == 16 and json.loads(plan.config_json) == {"draft_len": "auto"}  # type: ignore[attr-defined]
    assert select_method("prompt_lookup+eagle2", '{"max_nodes": "auto"}', LOADED, {}).config.auto_sizes == (
        "max_nodes",
    )
    assert "draft_len of method 'jacobi' cannot be \"auto\"" in refusal("jacobi", {"draft_len": "auto"})
    assert "not for one" in refusal("prompt_lookup+eagle2", {"eagle2": {"max_nodes": "auto"}})
