"""The methods that a request may name, and how to build their proposers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.capabilities import Capabilities
from orchestrator.errors import RequestError, unknown_name
from orchestrator.grammar import Matcher
from orchestrator.proposers.drafter import DraftLine, DraftModel, DraftModelConfig
from orchestrator.proposers.guarded import Guarded
from orchestrator.proposers.jacobi import Jacobi, JacobiConfig
from orchestrator.proposers.lookahead import Lookahead, LookaheadConfig
from orchestrator.proposers.memory import Recollection
from orchestrator.proposers.ngram import Ngram, NgramConfig
from orchestrator.proposers.none import NoProposer
from orchestrator.proposers.predicted import Predicted, PredictedConfig
from orchestrator.proposers.prompt_lookup import PromptLookup, PromptLookupConfig
from orchestrator.proposers.pruned import Pruned
from orchestrator.proposers.suffix import Suffix, SuffixConfig
from orchestrator.proposers.tables import Tables
from orchestrator.settings import MAX_NODES, MethodConfig, read_config
from orchestrator.types import Proposer, Rule, Sampling, Want

Lines = Callable[[str], DraftLine]


@dataclass(frozen=True)
class Materials:
    """What a proposer may draft from beside the context.

    lines: name of a drafter → the request's line to it. vocab_size, num_parameters: of the target; the latter 0 = not
    known. prediction: ids that the client expects as output. max_nodes: most draft nodes of a tree of this request.
    tables: token statistics of this deployment. memory: earlier responses that this request may draft from.
    matcher: where the output stands in the grammar that it must match, if it must.
    """

    lines: Lines
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
    build: Callable[[Any, Materials], Proposer]
    drafter: str | None = None
    branches: Callable[[Any], str] = lambda config: ""
    want: Want = Want()


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
        want=Lookahead.want,
    ),
    "jacobi": Method(JacobiConfig, lambda config, materials: Jacobi(config), want=Jacobi.want),
    "ngram": Method(NgramConfig, lambda config, materials: Ngram(config, materials.tables, materials.memory)),
    "suffix": Method(
        SuffixConfig,
        lambda config, materials: Suffix(config, materials.memory),
        branches=lambda config: "tree true" if config.tree else "",
    ),
    "draft_model": Method(
        DraftModelConfig, lambda config, materials: DraftModel(config, materials.lines("draft")), drafter="draft"
    ),
}


class Plan(NamedTuple):
    """The method of one request and its parameters, checked."""

    method: str
    config: MethodConfig

    def check_rule(self, rule: Rule) -> None:
        """Raise RequestError when the rule cannot decide on what the method proposes."""
        branches = METHODS[self.method].branches(self.config)
        if rule is Rule.BLOCK and branches:
            raise RequestError(
                f"rule 'block' decides on chains alone, and the method {self.method!r} has {branches}; "
                "use the rule 'rejection' (input rule)"
            )

    def check_served(self, capabilities: Capabilities, sampling: Sampling, want: Want) -> None:
        """Raise RequestError when the target's engine cannot serve the method with this sampling and these wants."""
        spec = METHODS[self.method]
        wanted = want.joined(spec.want)
        branches = spec.branches(self.config)
        if refusal := capabilities.refusal(sampling, wanted, method=self.method, branches=branches):
            raise RequestError(refusal)

    def proposer(self, materials: Materials) -> Proposer:
        """Build the request's proposer; raises RequestError when the deployment lacks what it drafts from."""
        proposer = METHODS[self.method].build(self.config, materials)
        if materials.matcher:
            proposer = Pruned(proposer, materials.matcher)
        return Guarded(proposer, materials.vocab_size)


def plan(method: str, config_json: str, drafters: frozenset[str], aliases: Mapping[str, int]) -> Plan:
    """Check a request's method and parameters; raises RequestError naming what is allowed.

    drafters: the drafter models that this deployment has loaded.
    aliases: parameters from inputs of their own (num_draft_tokens gives draft_len); the JSON goes before them.
    """
    if method not in METHODS:
        raise RequestError(unknown_name("method", method, METHODS, "input speculation"))
    spec = METHODS[method]
    if spec.drafter and spec.drafter not in drafters:
        raise RequestError(
            f"method {method!r} needs the drafter {spec.drafter!r}, which this server has not loaded "
            f"(key {spec.drafter} in serving.toml)"
        )
    return Plan(method, read_config(spec.config, method, config_json, aliases))
