"""Reads the body of a request into its declared fields; the errors name the field."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.errors import BadRequest, UnknownField, abbreviated, abbreviated_json, did_you_mean
from gateway.fields import REFUSED
from gateway.values import Fields

#: Deepest nesting of a body's objects and lists, the body itself included.
MAX_DEPTH = 100
#: Most keys of an object: each may be an error of its own, and no field needs that many.
MAX_KEYS = 4096
#: Most objects and lists of a body: as Python objects they take fifty times as much memory as in the body.
MAX_PARTS = 1 << 16
#: A string of a JSON document, to the end if it is not closed. Possessive, so that no input makes it slow.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

Parsed = TypeVar("Parsed", bound=Fields)


def parse(model: type[Parsed], raw: bytes | bytearray) -> Parsed:
    """Return the fields of a body; raises BadRequest naming the first that is unknown, missing or not allowed."""
    body = _object_of(raw)
    known = {field.alias or name for name, field in model.model_fields.items()}
    for name, value in body.items():
        if name not in known and value is not None:
            why = REFUSED.get(name) or f"unknown field {abbreviated(name)}{did_you_mean(name, known)}"
            raise UnknownField(why, _printable(name))
        _check_characters(name, value)
    try:
        return model.model_validate(body)
    except ValidationError as refused:
        errors = refused.errors(include_url=False, include_context=False)
    # For a field that may be of several types, the last error is about the one that fits best.
    first = str(errors[0]["loc"][0])
    of_first = [error for error in errors if error["loc"][0] == first]
    # A part of another type, such as an image, has unknown fields too; its type says more.
    error = next((error for error in of_first if error["type"] == "literal_error"), of_first[-1])
    path = ".".join(str(part) for part in error["loc"] if not _is_type(part))
    if error["type"] == "extra_forbidden":
        raise UnknownField(f"unknown field {path!r}", path)
    field = model.model_fields.get(first)
    if error["type"] != "missing" and field and field.description:
        raise BadRequest(f"{first} must be {field.description}, got {abbreviated(body[first])}", first)
    got = "" if error["type"] == "missing" else f", got {abbreviated(error['input'])}"
    raise BadRequest(f"{path}: {error['msg']}{got}", path)


def _object_of(raw: bytes | bytearray) -> dict[str, Any]:
    _check_parts(raw)
    try:
        body = json.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep, which is the most allowed") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, got {abbreviated_json(body)}")
    for name, value in body.items():
        _check_shape(name, value)
    return body


def _check_parts(raw: bytes | bytearray) -> None:
    """Raise BadRequest for a body with too many objects and lists, before any of them is built."""
    if _num_brackets(raw) > MAX_PARTS and _num_brackets(_STRING.sub(b"", raw)) > MAX_PARTS:
        raise BadRequest(f"the body has more than {MAX_PARTS} objects and lists, which is the most allowed")


def _num_brackets(raw: bytes | bytearray) -> int:
    return raw.count(b"[") + raw.count(b"{")


def _check_shape(name: str, value: Any) -> None:
    """Raise BadRequest for a field nested too deeply to be printed, or with an object of too many keys."""
    level, depth = [value], 1
    while level := [part for part in level if isinstance(part, dict | list)]:
        if (depth := depth + 1) > MAX_DEPTH:
            raise BadRequest(
                f"{abbreviated(name)} is nested more than {MAX_DEPTH} levels deep, which is the most allowed",
                _printable(name),
            )
        if any(len(part) > MAX_KEYS for part in level if isinstance(part, dict)):
            raise BadRequest(f"{abbreviated(name)} has an object of more than {MAX_KEYS} keys", _printable(name))
        level = [part for whole in level for part in (whole.values() if isinstance(whole, dict) else whole)]


def _check_characters(name: str, value: Any) -> None:
    """Raise BadRequest for a text with half of a surrogate pair: JSON can write one, UTF-8 and tokenizers cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadRequest(f"{name} has half of a surrogate pair, {half!r}, which is not a character", name) from None


def _printable(name: str) -> str:
    return name.encode(errors="replace").decode()


def _is_type(part: str | int) -> bool:
    """Return whether a part of an error's location names a type of a union, not a field."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())
