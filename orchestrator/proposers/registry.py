"""The methods that a request may name, and how to build their proposers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from orchestrator.core.errors import RequestError, unknown_name
from orchestrator.core.proposal import Proposer
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import MAX_NODES
from orchestrator.core.types import HiddenStates, StepOptions
from orchestrator.deployment.capabilities import Capabilities
from orchestrator.deployment.config import DRAFTER_OF, ENGINE_SIDE_ONLY
from orchestrator.proposers.drafters import (
    DrafterClient,
    DraftModel,
    DraftModelConfig,
    DynamicConfig,
    HeadConfig,
    HeadProposer,
    HeadTraits,
    RedrafterConfig,
    StaticConfig,
)
from orchestrator.proposers.engine_side import (
    EngineSideConfig,
    EngineSideEagleConfig,
    EngineSideLookaheadConfig,
    EngineSideProposer,
)
from orchestrator.proposers.guarded import Guarded, Pruned
from orchestrator.proposers.jacobi import Jacobi, JacobiConfig
from orchestrator.proposers.lookahead import Lookahead, LookaheadConfig
from orchestrator.proposers.memory import Recollection
from orchestrator.proposers.ngram import Ngram, NgramConfig
from orchestrator.proposers.none import NoProposer
from orchestrator.proposers.parameters import WHERE, MethodConfig, config_of, object_of, read_config, read_object
from orchestrator.proposers.predicted import Predicted, PredictedConfig
from orchestrator.proposers.prompt_lookup import PromptLookup, PromptLookupConfig
from orchestrator.proposers.suffix import Suffix, SuffixConfig
from orchestrator.proposers.tables import Tables
from orchestrator.proposers.union import Union, UnionConfig
from orchestrator.sampling.grammar_matcher import Matcher

MAX_MEMBERS = 4

DrafterClients = Callable[[str], DrafterClient]


@dataclass(frozen=True)
class ProposerDependencies:
    """What a proposer may draft from beside the context.

    lines: name of a drafter → the request's line to it. vocab_size, num_parameters: of the target; the latter 0 = not
    known. prediction: ids that the client expects as output. max_nodes: most draft nodes of a tree of this request.
    tables: token statistics of this deployment. memory: earlier responses that this request may draft from.
    matcher: where the output stands in the grammar that it must match, if it must.
    """

    lines: DrafterClients
    vocab_size: int
    prediction: tuple[int, ...] = ()
    max_nodes: int = MAX_NODES
    num_parameters: int = 0
    tables: Tables | None = None
    memory: Recollection | None = None
    matcher: Matcher | None = None


class Method(NamedTuple):
    """config: its parameters. build: (config, materials) → proposer. drafter: Triton model it asks, if any.

    branches: why, with these parameters, it may propose more than a chain; empty = it does not.
    want: what its proposer asks the target for.
    """

    config: type[MethodConfig]
    build: Callable[[Any, ProposerDependencies], Proposer]
    drafter: str | None = None
    branches: Callable[[Any], str] = lambda config: ""
    options: StepOptions = StepOptions()


def _head(name: str, config: type[HeadConfig], traits: HeadTraits) -> Method:
    return Method(
        config,
        lambda config, materials: HeadProposer(name, config, materials.lines(DRAFTER_OF[name]), traits),
        DRAFTER_OF[name],
        lambda config: "" if config.is_chain else "a tree",
        StepOptions(features_from=0, hidden_states=traits.states),
    )


METHODS: Mapping[str, Method] = {
    "none": Method(MethodConfig, lambda config, materials: NoProposer()),
    "prompt_lookup": Method(
        PromptLookupConfig,
        lambda config, materials: PromptLookup(config),
        branches=lambda config: "branches above 1" if config.branches > 1 else "",
    ),
    "predicted": Method(PredictedConfig, lambda config, materials: Predicted(config, materials.prediction)),
    "lookahead": Method(
        LookaheadConfig,
        lambda config, materials: Lookahead(config, materials.num_parameters, materials.max_nodes),
        branches=lambda config: "a window and guesses side by side",
        options=Lookahead.options,
    ),
    "jacobi": Method(JacobiConfig, lambda config, materials: Jacobi(config), options=Jacobi.options),
    "ngram": Method(NgramConfig, lambda config, materials: Ngram(config, materials.tables, materials.memory)),
    "suffix": Method(
        SuffixConfig,
        lambda config, materials: Suffix(config, materials.memory),
        branches=lambda config: "tree true" if config.tree else "",
    ),
    "draft_model": Method(
        DraftModelConfig, lambda config, materials: DraftModel(config, materials.lines("draft")), drafter="draft"
    ),
    "medusa": _head("medusa", StaticConfig, HeadTraits(HiddenStates.LAST, keeps=False)),
    "eagle": _head("eagle", StaticConfig, HeadTraits(HiddenStates.LAST, keeps=True)),
    "eagle2": _head("eagle2", DynamicConfig, HeadTraits(HiddenStates.LAST, keeps=True)),
    "eagle3": _head("eagle3", DynamicConfig, HeadTraits(HiddenStates.LAYERS, keeps=True)),
    "redrafter": _head("redrafter", RedrafterConfig, HeadTraits(HiddenStates.LAST, keeps=False)),
}


def _inside(name: str, config: type[EngineSideConfig]) -> Method:
    return Method(config, lambda config, materials: EngineSideProposer(name, config))


#: Methods of engines that draft by themselves, beside those that share a name but draft outside.
ENGINE_SIDE_METHODS: Mapping[str, Method] = {
    "medusa": _inside("medusa", EngineSideConfig),
    "eagle": _inside("eagle", EngineSideEagleConfig),
    "redrafter": _inside("redrafter", EngineSideConfig),
    "lookahead": _inside("lookahead", EngineSideLookaheadConfig),
    # The LLM API's: the first one drafts nothing, but streams all the same.
    **{
        name: _inside(name, EngineSideConfig)
        for name in ("none", "prompt_lookup", "draft_model", "eagle3", *ENGINE_SIDE_ONLY)
    },
}


class SelectedMethod(NamedTuple):
    """The method of one request and its parameters, checked.

    in_engine: the target's engine drafts by itself with it. parts: of a union, its methods.
    """

    method: str
    config: MethodConfig
    in_engine: bool = False
    parts: tuple[SelectedMethod, ...] = ()

    @property
    def spec(self) -> Method:
        """What the method is."""
        if self.parts:
            return _union(self.parts)
        return (ENGINE_SIDE_METHODS if self.in_engine else METHODS)[self.method]

    def check_rule(self, rule: Rule) -> None:
        """Raise RequestError when the rule cannot decide on what the method proposes."""
        branches = self.spec.branches(self.config)
        if rule is Rule.BLOCK and branches:
            raise RequestError(
                f"rule 'block' decides on chains alone, and the method {self.method!r} has {branches}; "
                "use the rule 'rejection' (input rule)"
            )

    def check_served(self, capabilities: Capabilities, sampling: Sampling, options: StepOptions) -> None:
        """Raise RequestError when the target's engine cannot serve the method with this sampling and these wants."""
        spec = self.spec
        wanted = options.merged(spec.options)
        branches = spec.branches(self.config)
        if refusal := capabilities.refusal(sampling, wanted, method=self.method, branches=branches):
            raise RequestError(refusal)

    def proposer(self, materials: ProposerDependencies) -> Proposer:
        """Build the request's proposer; raises RequestError when the deployment lacks what it drafts from."""
        proposer = self.spec.build(self.config, materials)
        if materials.matcher:
            proposer = Pruned(proposer, materials.matcher)
        return Guarded(proposer, materials.vocab_size)


def _union(parts: Sequence[SelectedMethod]) -> Method:
    """Return several methods as one; each is guarded by itself, so that one that fails takes no other along."""

    def build(config: MethodConfig, materials: ProposerDependencies) -> Proposer:
        members = [Guarded(part.spec.build(part.config, materials), materials.vocab_size) for part in parts]
        return Union(members, [part.config.max_nodes for part in parts])

    options = reduce(StepOptions.merged, (part.spec.options for part in parts))
    return Method(MethodConfig, build, branches=lambda config: "several proposers", options=options)


def select_method(
    method: str, config_json: str, drafters: frozenset[str], aliases: Mapping[str, int], engine_method: str = ""
) -> SelectedMethod:
    """Check a request's method and parameters; raises RequestError naming what is allowed.

    drafters: the drafter models that this deployment has loaded.
    aliases: parameters from inputs of their own (num_draft_tokens gives draft_len); the JSON goes before them.
    engine_method: the method that the target's engine drafts with by itself, and which needs no drafter then.
    """
    if engine_method and method == engine_method:
        return SelectedMethod(
            method, read_config(ENGINE_SIDE_METHODS[method].config, method, config_json, aliases), in_engine=True
        )
    if "+" in method:
        return _select_union(method, config_json, drafters, aliases)
    spec = _checked(method, drafters)
    return SelectedMethod(method, read_config(spec.config, method, config_json, aliases))


def _select_union(
    method: str, config_json: str, drafters: frozenset[str], aliases: Mapping[str, int]
) -> SelectedMethod:
    """Check a union: its parameters are `max_nodes`, and an object of parameters by the name of each method."""
    names = method.split("+")
    specs = {name: _checked(name, drafters) for name in names}
    if len(specs) < len(names) or len(names) > MAX_MEMBERS:
        raise RequestError(f"a union joins 2..{MAX_MEMBERS} different methods, got {method!r} (input speculation)")
    for name, spec in specs.items():
        if name == "none" or spec.options.target_tokens:
            why = "it proposes nothing" if name == "none" else "it learns from the target's picks at its own nodes"
            raise RequestError(f"method {name!r} cannot be part of a union: {why} (input speculation)")
    values = read_object(config_json)
    config = config_of(UnionConfig, method, {key: value for key, value in values.items() if key not in specs})
    parts = [
        SelectedMethod(
            name, config_of(spec.config, name, object_of(f"{name} in {WHERE}", values.get(name, {})), aliases)
        )
        for name, spec in specs.items()
    ]
    return SelectedMethod(method, config, parts=tuple(parts))


def _checked(method: str, drafters: frozenset[str]) -> Method:
    """Return the method of this name; raises RequestError when there is none, or the deployment lacks its drafter."""
    if method not in METHODS:
        raise RequestError(unknown_name("method", method, METHODS, "input speculation"))
    spec = METHODS[method]
    if spec.drafter and spec.drafter not in drafters:
        raise RequestError(
            f"method {method!r} needs the drafter {spec.drafter!r}, which this server has not loaded "
            f"(key {spec.drafter} in serving.toml)"
        )
    return spec
