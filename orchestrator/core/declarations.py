"""Checks the values that a file, the environment or a request sets: pydantic models with error messages of our own."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from orchestrator.core.errors import ConfigError, ServingError, abbreviated, did_you_mean, unknown_name

Model = TypeVar("Model", bound="Declaration")
#: Deepest nesting of objects and lists; Python's own limit depends on the caller's stack, and printing hits it first.
MAX_JSON_DEPTH = 100
_NOUNS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class Declaration(BaseModel):
    """Named values, each of exactly its declared type: True is not a number, 1.0 is not an integer, NaN is refused.

    A field's description names the allowed values in error messages, where its type and bounds do not.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ConfigKeys(Declaration):
    """Keys of a checkpoint's config.json, for `validate_config`; all other keys are ignored."""

    model_config = ConfigDict(extra="ignore")


def validate(
    model: type[Model],
    values: Mapping[str, Any],
    where: Callable[[str], str],
    *,
    error: type[ServingError] = ConfigError,
    what: str = "key",
) -> Model:
    """Return the model with these values; raises `error` for the first that is unknown, None, or not allowed.

    where: returns the place where a key is set. what: the noun for a key. Both are for the error message.
    """
    fields = fields_of(model)
    for key, value in values.items():
        if key not in fields:
            raise error(unknown_name(what, key, fields, where(key)))
        if value is None:
            raise error(refusal(key, value, fields[key], where(key)))
    try:
        return model.model_validate(values)
    except ValidationError as refused:
        first = refused.errors(include_url=False, include_context=False)[0]
    place = where(str(first["loc"][0]))
    key, field = _locate(model, first["loc"])
    raise error(
        f"{key} is missing ({place})" if first["type"] == "missing" else refusal(key, first["input"], field, place)
    )


def validate_config(model: type[Model], values: Mapping[str, Any], file: str) -> Model:
    """Return the model with its keys in a checkpoint's file; other keys are ignored, and null means absent."""
    known = {key: value for key, value in without_nulls(values).items() if key in fields_of(model)}
    return validate(model, known, lambda key: file)


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object without nulls, nested objects included."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


def _locate(model: type[Declaration], path: Sequence[int | str]) -> tuple[str, FieldInfo]:
    """Return the dotted name and the field at a path through nested declarations."""
    name, *rest = path
    field = fields_of(model)[str(name)]
    if rest and isinstance(field.annotation, type) and issubclass(field.annotation, Declaration):
        inner, field = _locate(field.annotation, rest)
        return f"{name}.{inner}", field
    return str(name), field


@cache
def fields_of(model: type[Declaration]) -> dict[str, FieldInfo]:
    """Return a model's fields, each under all names that set it."""
    return {
        str(name): field
        for key, field in model.model_fields.items()
        for name in (field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [key])
    }


def refusal(key: str, value: Any, field: FieldInfo, where: str) -> str:
    """Return the error message for a value that a field does not allow."""
    hint = did_you_mean(value, _allowed(field)[1]) if isinstance(value, str) else ""
    return f"{key} must be {allowed_values(field)}, got {abbreviated(value)}{hint} ({where})"


def allowed_values(field: FieldInfo) -> str:
    """Return in words which values a field allows."""
    return field.description or _allowed(field)[0]


def _allowed(field: FieldInfo) -> tuple[str, tuple[str, ...]]:
    """Return in words which values a field's type and bounds allow; and its options, if it has a fixed list of them."""
    kind = field.annotation
    if get_origin(kind) is UnionType:  # an optional value
        kind = get_args(kind)[0]
    if get_origin(kind) in (tuple, list):
        words, options = _allowed(FieldInfo.from_annotation(get_args(kind)[0]))
        return f"a list in which each value is {words}", options
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}", get_args(kind)
    low, high, above = (_bound(field, name) for name in ("ge", "le", "gt"))
    limits = f" in {low}..{high}" if high else f" of at least {low}" if low else f" above {above}" if above else ""
    return _NOUNS.get(kind, "an object") + limits, ()


def _bound(field: FieldInfo, name: str) -> str:
    """Return a bound of a field as text, empty if the field does not have it."""
    bounds = (getattr(rule, name) for rule in field.metadata if hasattr(rule, name))
    return next((f"{bound:.8g}" if isinstance(bound, float) else str(bound) for bound in bounds), "")


def parse_text(model: type[Declaration], key: str, text: str) -> Any:
    """Return the value of a flag or environment variable in the key's type; text that does not parse stays text."""
    kind = model.model_fields[key].annotation if key in model.model_fields else str
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind is int and re.fullmatch(r"-?[0-9]{1,20}", text):
        return int(text)
    try:
        return float(text) if kind is float else text
    except ValueError:
        return text


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """Return a TOML file's content; raises ConfigError if it cannot be read. what: the file's purpose."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the {what} file {file}: {error.strerror}") from None
    except ValueError as error:  # bad TOML or bad UTF-8
        raise ConfigError(f"{file} is not TOML: {error}") from None


def json_object(text: str, name: str, error: type[ServingError] = ConfigError) -> dict[str, Any]:
    """Parse a JSON object; raises `error` for any other text. name: names the text in the error message."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as reason:  # RecursionError: brackets nested too deeply
        raise error(f"{name} is not JSON: {reason}") from None
    check_depth(value, name, error)
    return as_object(value, name, error)


def check_depth(value: Any, name: str, error: type[ServingError] = ConfigError) -> None:
    """Raise `error` for a JSON value that is nested deeper than MAX_JSON_DEPTH."""
    level, depth = [value], 0
    while level := [part for part in level if isinstance(part, dict | list)]:
        if (depth := depth + 1) > MAX_JSON_DEPTH:
            raise error(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep, which is the most allowed")
        level = [part for whole in level for part in (whole.values() if isinstance(whole, dict) else whole)]


def as_object(value: Any, name: str, error: type[ServingError] = ConfigError) -> dict[str, Any]:
    """Return `value` if it is a JSON object; raises `error` if not."""
    if not isinstance(value, dict):
        raise error(f"{name} must be a JSON object, got {type(value).__name__}")
    return value


def read_json_file(file: Path, hint: str = "") -> dict[str, Any]:
    """Return the JSON object in a file; raises ConfigError when it cannot be read. hint: how to make the file."""
    try:
        return json_object(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}{f' ({hint})' if hint else ''}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
