"""The methods that a request may name, their parameters, and how to build their proposers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

from orchestrator.errors import RequestError, shown, unknown_name
from orchestrator.proposers.drafter import DraftLine, DraftModel
from orchestrator.proposers.none import NoProposer
from orchestrator.proposers.prompt_lookup import PromptLookup
from orchestrator.types import Proposer

MAX_NODES = 128
WHERE = "input speculation_config"


def _int(default: int, low: int, high: int) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Parameters that every method has. max_nodes: most draft nodes of a tree, root not counted."""

    max_nodes: int = _int(MAX_NODES, 0, MAX_NODES)


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(MethodConfig):
    """max_ngram: longest suffix looked up. draft_len: tokens proposed."""

    max_ngram: int = _int(3, 1, 32)
    draft_len: int = _int(10, 1, MAX_NODES)


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(MethodConfig):
    """draft_len: tokens proposed (γ)."""

    draft_len: int = _int(3, 1, MAX_NODES)


Lines = Callable[[str], DraftLine]


class Method(NamedTuple):
    """config: its parameters. build: (config, lines to drafters) → proposer. drafter: Triton model it asks, if any."""

    config: type[MethodConfig]
    build: Callable[[Any, Lines], Proposer]
    drafter: str | None = None


METHODS: Mapping[str, Method] = {
    "none": Method(MethodConfig, lambda config, lines: NoProposer()),
    "prompt_lookup": Method(PromptLookupConfig, lambda config, lines: PromptLookup(config.max_ngram, config.draft_len)),
    "draft_model": Method(
        DraftModelConfig,
        lambda config, lines: DraftModel(lines("draft"), config.draft_len),
        drafter="draft",
    ),
}


class Plan(NamedTuple):
    """The method of one request and its parameters, checked."""

    method: str
    config: MethodConfig

    def proposer(self, lines: Lines) -> Proposer:
        """Build the request's proposer."""
        return METHODS[self.method].build(self.config, lines)


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
    known = {f.name: f for f in fields(spec.config)}
    given = {name: value for name, value in aliases.items() if name in known}
    given |= _parse(config_json, method, known)
    return Plan(method, spec.config(**given))


def _parse(config_json: str, method: str, known: Mapping[str, Any]) -> dict[str, int]:
    if not config_json:
        return {}
    try:
        values = json.loads(config_json)
    except (ValueError, RecursionError) as error:  # the latter: brackets within brackets
        raise RequestError(f"{WHERE} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError(f"{WHERE} must be a JSON object, got {type(values).__name__}")
    for name, value in values.items():
        if name not in known:
            raise RequestError(unknown_name(f"key of {method}", name, known, WHERE))
        check_int(name, value, known[name].metadata["low"], known[name].metadata["high"], WHERE)
    return values


def check_int(name: str, value: Any, low: int, high: int, where: str) -> None:
    """Raise RequestError unless `value` is a whole number in low..high."""
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number in {low}..{high}, got {shown(value)} ({where})")


assert all(f.default is not MISSING for m in METHODS.values() for f in fields(m.config))
