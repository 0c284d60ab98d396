"""A pytest plugin (`-p tests.support.mutant`): imports one module of the product with a piece of its source changed.

The environment names the change: MUTANT = JSON of [file, sound text, broken text].
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = "MUTANT"


class Mutant(SourceFileLoader):
    """Loads one module from its changed source."""

    def __init__(self, name: str, path: str, sound: str, broken: str) -> None:
        super().__init__(name, path)
        self._sound, self._broken = sound, broken

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed source; the bytecode cache is neither read nor written."""
        source = self.get_data(self.path).decode()
        assert source.count(self._sound) == 1, f"{self.path} has {self._sound!r} {source.count(self._sound)} times"
        code: CodeType = compile(source.replace(self._sound, self._broken), self.path, "exec", dont_inherit=True)
        return code


class Finder(MetaPathFinder):
    """Finds the changed module before any other finder."""

    def __init__(self, file: str, sound: str, broken: str) -> None:
        self._name = file.removesuffix(".py").replace("/", ".")
        self._loader = Mutant(self._name, str(ROOT / file), sound, broken)

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the changed module's spec, and None for every other module."""
        return spec_from_file_location(fullname, loader=self._loader) if fullname == self._name else None


if ENVIRONMENT in os.environ:
    sys.meta_path.insert(0, Finder(*json.loads(os.environ[ENVIRONMENT])))
