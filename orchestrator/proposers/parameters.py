"""Parameters that a request may set: declared as fields of frozen dataclasses, read from JSON, checked by kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

from orchestrator.core.errors import RequestError, shown, unknown_name
from orchestrator.core.tree import MAX_NODES

WHERE = "input speculation_config"

Config = TypeVar("Config", bound="MethodConfig")


def whole(default: int, low: int, high: int) -> Any:
    """Declare a whole number in low..high."""
    return field(default=default, metadata={"kind": int, "low": low, "high": high})


def real(default: float, low: float, high: float) -> Any:
    """Declare a finite number in low..high."""
    return field(default=default, metadata={"kind": float, "low": low, "high": high})


def choice(default: str, *others: str) -> Any:
    """Declare a word out of a few."""
    return field(default=default, metadata={"kind": str, "allowed": (default, *others)})


def flag(default: bool) -> Any:
    """Declare true or false."""
    return field(default=default, metadata={"kind": bool})


def parsed(default: Any, read: Callable[[str, Any, str], Any]) -> Any:
    """Declare a value that `read` (name, JSON value, where) makes out of JSON, or refuses."""
    return field(default=default, metadata={"kind": None, "read": read})


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Parameters that every method has. max_nodes: most draft nodes of a tree, root not counted."""

    max_nodes: int = whole(MAX_NODES, 0, MAX_NODES)

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters that are given, and those that follow from them."""
        return given

    def __init_subclass__(cls) -> None:
        """Every parameter has a default, so that a request may leave out any."""
        for name in cls.__annotations__:
            assert name in vars(cls), f"{cls.__name__}.{name} has no default"


def read_config(config: type[Config], method: str, config_json: str, aliases: Mapping[str, int]) -> Config:
    """Return the parameters that a request sets, the others at their defaults.

    aliases: parameters from inputs of their own (num_draft_tokens gives draft_len); the JSON goes before them.
    Raises RequestError for what is no JSON object, an unknown key (naming the nearest) and a value out of range.
    """
    return config_of(config, method, read_object(config_json), aliases)


def config_of(
    config: type[Config], method: str, values: Mapping[str, Any], aliases: Mapping[str, int] = MappingProxyType({})
) -> Config:
    """Return the parameters that these JSON values set, as `read_config` does."""
    known = {f.name: f for f in fields(config)}
    given: dict[str, Any] = {name: value for name, value in aliases.items() if name in known}
    for name, value in values.items():
        if name not in known:
            raise RequestError(unknown_name(f"key of {method}", name, known, WHERE))
        given[name] = _checked(name, value, known[name].metadata)
    return config(**config.completed(given))


def read_object(config_json: str) -> dict[str, Any]:
    """Return a JSON object, empty for no text; raises RequestError for anything else."""
    try:
        values = json.loads(config_json or "{}")
    except (ValueError, RecursionError) as error:  # the latter: brackets within brackets
        raise RequestError(f"{WHERE} is not JSON: {error}") from None
    return object_of(WHERE, values)


def object_of(name: str, value: Any) -> dict[str, Any]:
    """Return a JSON object; raises RequestError for any other JSON value."""
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {type(value).__name__}")
    return value


def _checked(name: str, value: Any, rules: Mapping[str, Any]) -> Any:
    """Return `value` when the parameter may have it, else say what is allowed; exact types: True is no number."""
    kind = rules["kind"]
    if kind is None:
        return rules["read"](name, value, WHERE)
    if kind is bool and type(value) is bool:
        return value
    if kind is str and value in rules["allowed"]:
        return value
    if kind is int and type(value) is int and rules["low"] <= value <= rules["high"]:
        return value
    if kind is float and type(value) in (int, float) and rules["low"] <= value <= rules["high"]:  # NaN never is
        return float(value)
    raise RequestError(f"{name} must be {_allowed(rules)}, got {shown(value)} ({WHERE})")


def _allowed(rules: Mapping[str, Any]) -> str:
    if rules["kind"] is bool:
        return "true or false"
    if rules["kind"] is str:
        return f"one of {', '.join(rules['allowed'])}"
    noun = "a whole number" if rules["kind"] is int else "a number"
    return f"{noun} in {rules['low']}..{rules['high']}"
