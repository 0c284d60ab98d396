"""`python -m tools.layers`: imports go down only (docs/architecture.md, Layers); imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HEAVY = ("torch", "transformers", "safetensors", "pytriton")
_PB_UTILS = "triton_python_backend_utils"
_OURS = ("orchestrator", "runtime", "launcher", "gateway", "build", "clients", "tools", "tests", "model_repository")

#: The orchestrator from bottom to top; a module may import its own layer and those below it.
_ORCHESTRATOR = (
    ("errors", "noise", "tree", "context", "sampling_params", "types", "proposal"),
    ("choices", "drawn", "tensors", "wire_head", "wire_inside", "wire_sampling", "wire_want", "wire_errors", "workers"),
    (
        "config",
        "checkpoint",
        "engine_trees",
        "engine_manifest",
        "llm_manifest",
        "capabilities",
        "wire",
        "breaker",
        "admission",
    ),
    ("sampling", "accept", "shaping", "matcher", "grammar", "text", "stats"),
    ("settings", "reference"),
    ("proposers",),
    ("methods",),
    ("trace", "loop", "request"),
    ("job", "sampled", "response", "together"),
    ("triton",),
)
#: What every engine may use of the orchestrator.
_PURE_CORE = tuple(name for layer in _ORCHESTRATOR[:4] for name in layer)


class Rule(NamedTuple):
    """What the files below `folder` may not import."""

    folder: str
    forbidden: tuple[str, ...]
    why: str


RULES = (
    Rule(
        "orchestrator",
        (*_HEAVY, "runtime", "launcher", "build", "clients", "tools", "tests"),
        "it stays small and pure",
    ),
    Rule("runtime", ("launcher", "build", "clients", "tools", "tests", _PB_UTILS), "engines know no Triton"),
    Rule(
        "launcher",
        (*_HEAVY, "numpy", "tritonclient", "runtime", "build", "clients", "tools", "tests", _PB_UTILS),
        "stdlib only",
    ),
    Rule("clients", tuple(name for name in _OURS if name != "clients"), "clients are single files that people copy"),
    Rule("build", ("launcher", "clients", "tests", _PB_UTILS), "it makes models and serves none"),
    Rule(
        "model_repository",
        ("build", "launcher", "clients", "tools", "tests", "torch", "transformers"),
        "models delegate",
    ),
    Rule("tools", tuple(name for name in _OURS if name != "tools"), "tools run before anything is installed"),
)


#: The one client that nobody copies: it starts the server that it then asks.
_EXCEPTIONS = {("clients/demo.py", "launcher")}


class Import(NamedTuple):
    """One import statement's target."""

    module: str
    line: int


def violations(root: Path) -> list[str]:
    """Return one line for each import below `root` that goes up or aside."""
    found = []
    for rule in RULES:
        for path in sorted((root / rule.folder).rglob("*.py")):
            found += [
                f"{path.relative_to(root)}:{line}: {what}" for line, what in _check(path.relative_to(root), rule, root)
            ]
    return found


def _check(path: Path, rule: Rule, root: Path) -> Iterator[tuple[int, str]]:
    for module, line in imports(root / path):
        if (path.as_posix(), module) in _EXCEPTIONS:
            continue
        if module.startswith("."):
            yield line, "imports are absolute, so that a layer can be read off them"
        elif _below(module, rule.forbidden):
            yield line, f"{rule.folder} may not import {module}: {rule.why}"
        elif rule.folder == "orchestrator" and (what := _goes_up(path, module)):
            yield line, what
        elif rule.folder == "runtime" and module.startswith("orchestrator.") and module.split(".")[1] not in _PURE_CORE:
            yield line, f"runtime may import {', '.join(_PURE_CORE)} of the orchestrator, not {module}"
        elif rule.folder == "launcher" and module.startswith("orchestrator.") and not _below(module, _CONFIG):
            yield line, f"launcher may import {' and '.join(_CONFIG)}, not {module}"


_CONFIG = ("orchestrator.config", "orchestrator.errors")


def _goes_up(path: Path, module: str) -> str:
    """Say what is wrong when an orchestrator file imports a layer above its own."""
    own = path.parts[1].removesuffix(".py")
    if module == _PB_UTILS and own != "triton":
        return f"only orchestrator/triton knows {_PB_UTILS}"
    other = module.split(".")[1] if module.startswith("orchestrator.") else None
    if own == "__init__" or other is None:
        return ""
    for name in (own, other):
        if _level(name) is None:
            return f"orchestrator.{name} has no layer: add it to tools/layers.py"
    return f"orchestrator.{own} may not import {module}, a layer above" if _level(other) > _level(own) else ""  # type: ignore[operator]


def _level(name: str) -> int | None:
    return next((level for level, names in enumerate(_ORCHESTRATOR) if name in names), None)


def imports(path: Path) -> Iterator[Import]:
    """Yield what a file imports; `from a import b` is a.b where a is a package of ours."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield Import("." * node.level, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in _OURS:
            yield from (Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.module or "", node.lineno)


def _below(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def main() -> int:
    """Print the violations; return the exit status."""
    found = violations(Path.cwd())
    print("\n".join(found) if found else "layers: imports go down only")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
