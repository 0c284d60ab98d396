"""`python -m tools.layers`: imports go down only (docs/architecture.md, Layers); imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_HEAVY = ("torch", "transformers", "safetensors", "pytriton")
_PB_UTILS = "triton_python_backend_utils"
_PRODUCTS = ("auditor", "benchmarks", "build", "clients", "gateway", "launcher", "tools", "tests")

#: The packages and folders that serve → what each may import of them; whatever is not listed is an error.
#: orchestrator/core is the ground floor, and native stands on it (docs/architecture.md, Layers).
ALLOWED: dict[str, tuple[str, ...]] = {
    "orchestrator/core": ("orchestrator/core",),
    "native": ("orchestrator/core", "native"),
    "orchestrator/drafting": ("orchestrator/core", "native", "orchestrator/drafting"),
    "orchestrator/server": ("orchestrator/core", "orchestrator/drafting", "orchestrator/server"),
    "runtime/models": ("orchestrator/core", "native", "runtime/models", "runtime/engine"),
    "runtime/engine": ("orchestrator/core", "native", "runtime/models", "runtime/engine"),
    "runtime/trtllm": ("orchestrator/core", "runtime/engine", "runtime/trtllm"),
    "launcher": ("orchestrator/core",),
}

_SERVING = ("native", "orchestrator", "runtime")

#: Folder → what its files must not import.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "native": (*_HEAVY, _PB_UTILS, "runtime", *_PRODUCTS),
    "orchestrator": (*_HEAVY, "runtime", *_PRODUCTS),
    "runtime": (_PB_UTILS, *_PRODUCTS),
    "launcher": (*_HEAVY, _PB_UTILS, "numpy", "tritonclient", "runtime", *(p for p in _PRODUCTS if p != "launcher")),
    "clients": ("native", "orchestrator", "runtime", "model_repository", *(p for p in _PRODUCTS if p != "clients")),
    "gateway": (
        *_HEAVY,
        "native",
        "orchestrator",
        "runtime",
        "model_repository",
        *(p for p in _PRODUCTS if p != "gateway"),
    ),
    "build": (_PB_UTILS, "launcher", "clients", "auditor", "benchmarks", "tests"),
    "auditor": (_PB_UTILS, "tests"),
    "benchmarks": (_PB_UTILS, "auditor", "tests"),
    "model_repository": ("torch", "transformers", *_PRODUCTS),
    "tools": ("orchestrator", "runtime", *(p for p in _PRODUCTS if p != "tools")),
}
#: Clients that are not meant to be copied: they start the server that they ask. A page that is made from a declaration.
_EXCEPTIONS = {
    ("clients/demo.py", "launcher"),
    ("clients/load.py", "launcher"),
    ("tools/configuration.py", "orchestrator.core.declarations"),
    ("tools/configuration.py", "orchestrator.core.deployment.config"),
}


def violations(root: Path) -> list[str]:
    """Return one line for each import below `root` that breaks a rule."""
    return [
        f"{path}:{line}: {wrong}"
        for folder in FORBIDDEN
        for path in sorted(file.relative_to(root) for file in (root / folder).rglob("*.py"))
        for module, line in imports(root / path)
        if (path.as_posix(), module) not in _EXCEPTIONS and (wrong := _wrong(path, module))
    ]


def _wrong(path: Path, module: str) -> str:
    """Return what is wrong with an import, or an empty string."""
    folder, own = path.parts[0], _layer(path.parts)
    if module.startswith("."):
        return "imports are absolute, so that a layer can be read off them"
    if _is_below(module, FORBIDDEN[folder]):
        return f"{folder} may not import {module}"
    if folder == "orchestrator" and module == _PB_UTILS and own != "orchestrator/server":
        return f"only orchestrator/server may import {_PB_UTILS}"
    imported = _layer(tuple(module.split(".")))
    if imported.split("/")[0] not in _SERVING or own not in ALLOWED:
        return f"{own} is not a layer (tools/layers.py, ALLOWED)" if folder in _SERVING and own not in ALLOWED else ""
    return "" if imported in ALLOWED[own] else f"{own} may import {', '.join(ALLOWED[own])}, not {module}"


def _layer(parts: tuple[str, ...]) -> str:
    """Return the layer of a path or module: its package, and in orchestrator and runtime also the folder below."""
    return "/".join(parts[:2]) if parts[0] in ("orchestrator", "runtime") and len(parts) > 1 else parts[0]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each import of a file with its line; `from a import b` is a.b if a is one of our packages."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module in (*_PRODUCTS, "orchestrator", "runtime", "native"):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno


def _is_below(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def main() -> int:
    """Print the violations; return the exit status."""
    found = violations(Path.cwd())
    print("\n".join(found) if found else "layers: imports go down only")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
