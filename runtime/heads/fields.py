"""Values of a head's config.json, each read as what it must be; knows neither keys nor heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from orchestrator.errors import ConfigError, shown


class Fields(NamedTuple):
    """An object of a JSON file. Law: null is as absent; what is of another kind is refused with key and value.

    place: where the object stands in the file, with a dot behind it.
    """

    values: Mapping[str, Any]
    file: str
    place: str = ""

    def number(self, key: str, default: int | None = None, low: int = 1) -> int:
        """Return a whole number of at least `low`."""
        value = self._value(key, default)
        if type(value) is not int or value < low:
            raise self.refusal(key, f"be a whole number of at least {low}", value)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refusal(key, "be a number above 0", value)
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "be a text", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "be true or false", value)
        return value

    def numbers(self, key: str) -> list[int]:
        """Return a list of whole numbers, empty where there is none."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise self.refusal(key, "be a list of whole numbers", value)
        return value

    def mapping(self, key: str) -> Fields:
        """Return the object under a key, empty where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, "be an object", value)
        return Fields(value, self.file, f"{self.place}{key}.")

    def refusal(self, key: str, allowed: str, value: object) -> ConfigError:
        """Return the error that says what a value must do or be."""
        return ConfigError(f"{self.place}{key} must {allowed}, got {shown(value)} ({self.file})")

    def _value(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        return default if value is None else value
