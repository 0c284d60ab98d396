"""Declared values: what is refused, and in which words."""

from typing import Any, Literal

import pytest
from pydantic import AliasChoices, Field

from orchestrator.core.declarations import (
    ConfigKeys,
    Declaration,
    json_object,
    parse_text,
    read_json_file,
    validate,
    validate_config,
)
from orchestrator.core.errors import ConfigError, RequestError


class Example(Declaration):
    name: str
    count: int = Field(1, ge=1, le=5, validation_alias=AliasChoices("count", "number"))
    share: float = Field(0.5, ge=0.25, le=1)
    least: int = Field(1, ge=1)
    width: float = Field(1.0, gt=0)
    mode: Literal["fast", "slow"] = "fast"
    on: bool = True
    ids: tuple[int, ...] = ()
    most: int | None = Field(None, ge=0, le=9)


class Inner(ConfigKeys):
    factor: float = Field(1.0, gt=0)


class Outer(ConfigKeys):
    inner: Inner = Inner()


def example(**values: Any) -> Example:
    return validate(Example, {"name": "n", **values}, lambda key: f"key {key} in file")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"count": 0}, "count must be an integer in 1..5, got 0 (key count in file)"),
        ({"count": True}, "count must be an integer in 1..5, got True (key count in file)"),
        ({"count": 1.0}, "count must be an integer in 1..5, got 1.0 (key count in file)"),
        ({"number": 6}, "number must be an integer in 1..5, got 6 (key number in file)"),
        ({"share": float("nan")}, "share must be a number in 0.25..1, got nan (key share in file)"),
        ({"share": "1"}, "share must be a number in 0.25..1, got '1' (key share in file)"),
        ({"least": 0}, "least must be an integer of at least 1, got 0 (key least in file)"),
        ({"width": 0}, "width must be a number above 0, got 0 (key width in file)"),
        ({"mode": "fasst"}, "mode must be one of fast, slow, got 'fasst'; did you mean 'fast'? (key mode in file)"),
        ({"on": 1}, "on must be true or false, got 1 (key on in file)"),
        ({"most": 10}, "most must be an integer in 0..9, got 10 (key most in file)"),
        ({"most": None}, "most must be an integer in 0..9, got None (key most in file)"),
        ({"ids": (1, "2")}, "ids must be a list in which each value is an integer, got '2' (key ids in file)"),
        ({"name": 3}, "name must be a string, got 3 (key name in file)"),
        ({"nam": 3}, "unknown key 'nam'; did you mean 'name'? (allowed: count, ids, least, mode, most, name, "),
    ],
)
def test_value_that_is_not_allowed_is_named_with_what_is(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        example(**values)
    assert str(caught.value).startswith(words)


def test_values_are_kept_by_any_of_their_names() -> None:
    assert example(number=3).count == 3 and example(count=2).count == 2 and example(share=1).share == 1.0


def test_required_value_that_is_missing_is_named() -> None:
    with pytest.raises(RequestError, match=r"name is missing \(input name\)"):
        validate(Example, {}, lambda key: f"input {key}", error=RequestError)


def test_keys_of_a_checkpoint_leave_others_aside_and_take_null_as_absent() -> None:
    assert validate_config(Outer, {"other": 1, "inner": {"factor": None, "more": 2}}, "f") == Outer()
    with pytest.raises(ConfigError, match=r"^inner\.factor must be a number above 0, got -1 \(f\)$"):
        validate_config(Outer, {"inner": {"factor": -1}}, "f")
    with pytest.raises(ConfigError, match=r"^inner must be an object, got 3 \(f\)$"):
        validate_config(Outer, {"inner": 3}, "f")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "-3", -3),
        ("count", "3.0", "3.0"),
        ("count", "9" * 5000, "9" * 5000),
        ("share", "0.5", 0.5),
        ("share", "half", "half"),
        ("on", "False", False),
        ("on", "0", "0"),
        ("name", "12", "12"),
        ("other", "12", "12"),
    ],
)
def test_text_of_a_flag_or_a_variable_becomes_the_key_s_type_or_stays_text(key: str, text: str, value: Any) -> None:
    parsed = parse_text(Example, key, text)
    assert parsed == value and type(parsed) is type(value)


def test_json_is_an_object_or_is_refused_by_name(tmp_path) -> None:
    assert json_object('{"a": 1}', "it") == {"a": 1}
    for text, words in (
        ("[]", "it must be a JSON object, got list"),
        ("{", "it is not JSON"),
        ("[" * 10**5, "it is not"),
    ):
        with pytest.raises(RequestError, match=words):
            json_object(text, "it", RequestError)
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file or directory \(make it\)"):
        read_json_file(tmp_path / "x.json", "make it")
    (tmp_path / "x.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"x\.json is not JSON"):
        read_json_file(tmp_path / "x.json")
