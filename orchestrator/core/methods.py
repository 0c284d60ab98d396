"""The drafting methods, one declaration each; configuration, requests, proposers and capabilities derive from it.

To add a method, write its proposer and declare it here (docs/architecture.md, Add a method). The proposers
are not imported here: `orchestrator/drafting/registry.py` loads them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.core.errors import RequestError, unknown_name
from orchestrator.core.types import HiddenStates, StepOptions

MAX_MEMBERS = 4

#: The parameters of an engine whose drafting is fixed when it is built.
_AS_BUILT = "engine_side:EngineSideConfig"


@dataclass(frozen=True)
class Method:
    """A drafting method.

    proposer: its class or a function that builds it, as "module:name" in orchestrator.drafting; empty = only engines
    that draft by themselves have the method.
    config: the class of its parameters, named the same way.
    drafter: the Triton model that it calls, also a key of serving.toml; empty = it drafts in this process.
    branches: why its trees branch unless the parameters say `is_chain`; empty = it only proposes chains.
    target_tokens: it learns from the target's tokens at all nodes of its own tree.
    hidden_states: the hidden states of the target that its drafter reads.
    reads_every_state: its drafter reads the states of all tokens and reports how many it has; others read the newest.
    num_node_top: how many of the most probable tokens it reads at every verified node.
    build_mode: the build mode of compiled engines that draft with the method by themselves.
    engine_config: the class of its parameters if the target's engine drafts by itself; empty = no engine can.
    """

    name: str
    proposer: str = ""
    config: str = "parameters:MethodConfig"
    drafter: str = ""
    branches: str = ""
    target_tokens: bool = False
    hidden_states: HiddenStates = HiddenStates.NONE
    reads_every_state: bool = False
    num_node_top: int = 0
    build_mode: str = ""
    engine_config: str = ""

    @property
    def options(self) -> StepOptions:
        """What its proposer needs from a step."""
        features_from = 0 if self.hidden_states else None
        return StepOptions(
            self.target_tokens,
            features_from=features_from,
            hidden_states=self.hidden_states,
            num_node_top=self.num_node_top,
        )

    @property
    def needs_only_tokens(self) -> bool:
        """True if any target that verifies chains can serve it: it drafts, and reads committed tokens only."""
        return bool(self.proposer) and self.name != "none" and self.options == StepOptions()

    @property
    def can_be_cut(self) -> bool:
        """True if nodes of its trees may be left out: it neither learns from them nor sizes its trees itself."""
        return bool(self.proposer) and not self.target_tokens and self.name not in _ALONE

    @property
    def engine_side(self) -> Method:
        """The same method, drafted by the target's engine itself."""
        return Method(self.name, "engine_side:EngineSideProposer", self.engine_config)


#: Methods that cannot be members of a union, and why.
_ALONE = {"none": "it proposes nothing", "auto": "it chooses among proposers itself"}
_HEAD = Method(
    "head", "drafters:HeadProposer", "drafter_configs:StaticConfig", branches="a tree", hidden_states=HiddenStates.LAST
)
_EAGLE = replace(_HEAD, drafter="eagle", reads_every_state=True)
_ALL = (
    Method("none", "none:NoProposer", engine_config=_AS_BUILT),
    Method("auto", "auto:Auto", "auto:AutoConfig", branches="tree true"),
    Method(
        "prompt_lookup",
        "lookup:PromptLookup",
        "lookup:PromptLookupConfig",
        branches="branches above 1",
        engine_config=_AS_BUILT,
    ),
    Method("ngram", "ngram:Ngram", "ngram:NgramConfig"),
    Method("suffix", "lookup:Suffix", "lookup:SuffixConfig", branches="tree true", engine_config=_AS_BUILT),
    Method(
        "lookahead",
        "lookahead:Lookahead",
        "lookahead:LookaheadConfig",
        branches="a window and guesses side by side",
        target_tokens=True,
        build_mode="lookahead_decoding",
        engine_config="engine_side:EngineSideLookaheadConfig",
    ),
    Method("jacobi", "jacobi:Jacobi", "jacobi:JacobiConfig", target_tokens=True),
    Method("recycling", "recycling:Recycling", "recycling:RecyclingConfig", branches="a tree", num_node_top=8),
    Method("predicted", "lookup:Predicted", "lookup:PredictedConfig"),
    Method(
        "draft_model",
        "drafters:DraftModel",
        "drafter_configs:DraftModelConfig",
        drafter="draft",
        branches="top_k above 1",
        engine_config=_AS_BUILT,
    ),
    replace(_HEAD, name="medusa", drafter="medusa", build_mode="medusa", engine_config=_AS_BUILT),
    replace(_EAGLE, name="eagle", build_mode="eagle", engine_config="engine_side:EngineSideEagleConfig"),
    replace(_EAGLE, name="eagle2", config="drafter_configs:DynamicConfig", build_mode="eagle", engine_config=_AS_BUILT),
    replace(
        _EAGLE,
        name="eagle3",
        config="drafter_configs:DynamicConfig",
        drafter="eagle3",
        hidden_states=HiddenStates.LAYERS,
        engine_config=_AS_BUILT,
    ),
    replace(
        _HEAD,
        name="redrafter",
        config="drafter_configs:RedrafterConfig",
        drafter="redrafter",
        build_mode="explicit_draft_tokens",
        engine_config=_AS_BUILT,
    ),
    *(Method(name, engine_config=_AS_BUILT) for name in ("mtp", "pard", "dflash")),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
#: Names of the methods that have a proposer; the others exist only in engines that draft by themselves.
PROPOSED: tuple[str, ...] = tuple(method.name for method in _ALL if method.proposer)
#: The Triton models beside the target, each a key of serving.toml.
DRAFTERS: tuple[str, ...] = tuple(dict.fromkeys(method.drafter for method in _ALL if method.drafter))


def names_in(speculation: str) -> list[str]:
    """Return the names of the methods in a union, which are joined by "+", or the single name."""
    return speculation.split("+")


def find_methods(speculation: str, where: str, known: tuple[str, ...] = PROPOSED) -> tuple[Method, ...]:
    """Return the members of a union, or the single method.

    known: the allowed names. Raises RequestError for another name, and for methods that cannot form a union.
    """
    names = names_in(speculation)
    for name in names:
        if name not in known:
            raise RequestError(unknown_name("method", name, known, where))
    methods = tuple(METHODS[name] for name in names)
    if len(methods) == 1:
        return methods
    if len(set(names)) < len(names) or len(names) > MAX_MEMBERS:
        raise RequestError(f"a union joins 2..{MAX_MEMBERS} different methods, got {speculation!r} ({where})")
    for method in methods:
        if method.name in _ALONE or method.target_tokens:
            why = _ALONE.get(method.name, "it learns from the target's tokens at its own nodes")
            raise RequestError(f"method {method.name!r} cannot be part of a union: {why} ({where})")
    return methods
