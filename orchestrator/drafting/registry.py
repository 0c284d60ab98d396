"""Checks the method and the parameters that a request names, and builds its proposer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Any, NamedTuple

from orchestrator.core.declarations import as_object
from orchestrator.core.deployment.capabilities import Capabilities
from orchestrator.core.errors import RequestError
from orchestrator.core.methods import METHODS, Method, find_methods
from orchestrator.core.proposal import Proposer
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.types import HiddenStates, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.guarded import Guarded
from orchestrator.drafting.parameters import WHERE, MethodConfig, config_of, read_object
from orchestrator.drafting.sized import Sized
from orchestrator.drafting.union import Union, UnionConfig


def load(name: str) -> Any:
    """Import what a method's declaration names as "module:name"."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"orchestrator.drafting.{module}"), attribute)


class SelectedMethod(NamedTuple):
    """The method of one request and its parameters, checked.

    method: the name in the request. members: those of a union.
    """

    method: str
    declaration: Method
    config: MethodConfig
    members: tuple[SelectedMethod, ...] = ()

    @property
    def branches(self) -> str:
        """Why its trees may branch with these parameters; empty = it only proposes chains."""
        return "" if self.config.is_chain else self.declaration.branches

    def as_chain(self) -> SelectedMethod:
        """Return the method with chains only, if it adapts to a rule or an engine that takes no trees."""
        return self._replace(config=self.config.as_chain())

    def check_rule(self, rule: Rule) -> None:
        """Raise RequestError if the rule cannot verify the method's trees."""
        if rule is Rule.BLOCK and self.branches:
            raise RequestError(
                f"rule 'block' decides on chains alone, and the method {self.method!r} has {self.branches}; "
                "use the rule 'rejection' (input rule)"
            )

    def check_served(self, capabilities: Capabilities, sampling: Sampling, options: StepOptions) -> None:
        """Raise RequestError when the target's engine cannot serve the method with this sampling and these options."""
        step = options.merged(self.declaration.options)
        if refusal := capabilities.refusal(sampling, step, method=self.method, branches=self.branches):
            raise RequestError(refusal)

    @property
    def drafter(self) -> str:
        """The first drafter that it calls; empty = it drafts in the process of its proposer."""
        return next((method.drafter for method in self._declarations if method.drafter), "")

    @property
    def _declarations(self) -> list[Method]:
        return [member.declaration for member in self.members] or [self.declaration]

    @property
    def config_json(self) -> str:
        """The parameters that the request set, as `speculation_config` takes them."""
        return json.dumps(self.config.as_given | {each.method: each.config.as_given for each in self.members})

    def proposer(self, dependencies: ProposerDependencies, limit_s: float = math.inf) -> Proposer:
        """Build the request's proposer; raises RequestError when the deployment lacks what it drafts from.

        limit_s: longest time of a proposal, if others wait for it.
        """
        proposer, costs = self._build(dependencies), dependencies.step_costs
        if self.config.auto_sizes and all(method.can_be_cut for method in self._declarations):
            is_chain = not self.branches
            proposer = Sized(proposer, costs, self.config.num_levels, is_chain)
        return Guarded(proposer, dependencies.vocab_size, dependencies.matcher, limit_s, costs)

    def _build(self, dependencies: ProposerDependencies) -> Proposer:
        """Build the bare proposer; each member of a union is guarded, so that its failure leaves the others alone."""
        if self.members:
            members = [Guarded(member._as_member(dependencies), dependencies.vocab_size) for member in self.members]
            return Union(members, [member.config.max_nodes for member in self.members])
        own = replace(dependencies, method=self.declaration)
        proposer: Proposer = load(self.declaration.proposer)(self.config, own)
        return proposer

    def _as_member(self, dependencies: ProposerDependencies) -> Proposer:
        return self._replace(config=self.config.as_member())._build(dependencies)


def select_method(
    speculation: str, config_json: str, drafters: frozenset[str], aliases: Mapping[str, int], engine_method: str = ""
) -> SelectedMethod:
    """Check a request's method and parameters; raises RequestError naming what is allowed.

    drafters: the drafter models that this deployment has loaded.
    aliases: parameters that have inputs of their own (num_draft_tokens sets draft_len); the JSON takes precedence.
    engine_method: the method with which the target's engine drafts by itself, without a drafter.
    """
    if engine_method and speculation == engine_method:
        return _configured(METHODS[speculation].engine_side, read_object(config_json), aliases)
    methods = find_methods(speculation, "input speculation")
    for method in methods:
        if method.drafter and method.drafter not in drafters:
            raise RequestError(
                f"method {method.name!r} needs the drafter {method.drafter!r}, which this server has not loaded "
                f"(key {method.drafter} in the deployment file)"
            )
    values = read_object(config_json)
    if len(methods) == 1:
        return _configured(methods[0], values, aliases)
    return _united(speculation, methods, values, aliases)


def _configured(method: Method, values: Mapping[str, Any], aliases: Mapping[str, int]) -> SelectedMethod:
    config = config_of(load(method.config), method.name, values, aliases)
    if config.auto_sizes and (method.target_tokens or method.proposer == METHODS[method.name].engine_side.proposer):
        why = "it learns from the target's tokens at all its nodes" if method.target_tokens else "the engine drafts"
        raise RequestError(f'{config.auto_sizes[0]} of method {method.name!r} cannot be "auto": {why} ({WHERE})')
    return SelectedMethod(method.name, method, config)


def _united(
    name: str, methods: tuple[Method, ...], values: Mapping[str, Any], aliases: Mapping[str, int]
) -> SelectedMethod:
    """Check a union's parameters: `max_nodes`, and an object of parameters under the name of each method."""
    names = [method.name for method in methods]
    config = config_of(UnionConfig, name, {key: value for key, value in values.items() if key not in names})
    states = reduce(or_, (method.hidden_states for method in methods), HiddenStates.NONE)
    members = tuple(
        _configured(method, as_object(values.get(method.name, {}), f"{method.name} in {WHERE}", RequestError), aliases)
        for method in methods
    )
    if sizes := next((member.config.auto_sizes for member in members if member.config.auto_sizes), ()):
        raise RequestError(f'{sizes[0]}: "auto" is for all members of {name!r} together, not for one ({WHERE})')
    num_top = max(method.num_node_top for method in methods)
    united = Method(name, branches="several proposers", hidden_states=states, num_node_top=num_top)
    return SelectedMethod(name, united, config, members)
