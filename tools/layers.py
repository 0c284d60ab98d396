"""`python -m tools.layers`: imports go down only (docs/architecture.md, Layers); imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_HEAVY = ("torch", "transformers", "safetensors", "pytriton")
_PB_UTILS = "triton_python_backend_utils"
_PRODUCTS = ("auditor", "benchmarks", "build", "clients", "gateway", "launcher", "tools", "tests")

#: The orchestrator's folders from bottom to top, called rooms here; a module may import its own row and those below.
ROOMS = (
    ("core",),
    ("native",),
    ("sampling", "wire", "deployment"),
    ("proposers",),
    ("generation", "requests"),
    ("triton",),
)
#: The rooms that other folders may import; a folder that is not here may import all of them, unless FORBIDDEN says no.
ALLOWED_ROOMS = {
    "runtime": tuple(room for row in ROOMS[:3] for room in row),
    "launcher": ("core", "deployment"),
}

#: Folder → what its files must not import.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "orchestrator": (*_HEAVY, "runtime", *_PRODUCTS),
    "runtime": (_PB_UTILS, *_PRODUCTS),
    "launcher": (*_HEAVY, _PB_UTILS, "numpy", "tritonclient", "runtime", *(p for p in _PRODUCTS if p != "launcher")),
    "clients": ("orchestrator", "runtime", "model_repository", *(p for p in _PRODUCTS if p != "clients")),
    "gateway": (*_HEAVY, "orchestrator", "runtime", "model_repository", *(p for p in _PRODUCTS if p != "gateway")),
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
    ("tools/configuration.py", "orchestrator.deployment.config"),
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
    folder = path.parts[0]
    if module.startswith("."):
        return "imports are absolute, so that a layer can be read off them"
    if _is_below(module, FORBIDDEN[folder]):
        return f"{folder} may not import {module}"
    if folder == "orchestrator" and module == _PB_UTILS and path.parts[1] != "triton":
        return f"only orchestrator/triton may import {_PB_UTILS}"
    if not module.startswith("orchestrator."):
        return ""
    room = module.split(".")[1]
    allowed = ALLOWED_ROOMS.get(folder, (room,))
    if room not in allowed:
        return f"{folder} may import {', '.join(allowed)} of the orchestrator, not {module}"
    return _goes_up(path.parts[1], module, room) if folder == "orchestrator" else ""


def _goes_up(own: str, module: str, room: str) -> str:
    for name in (own, room):
        if name != "__init__.py" and _row(name) is None:
            return f"orchestrator.{name.removesuffix('.py')} is not a room of the orchestrator (tools/layers.py, ROOMS)"
    return f"orchestrator.{own} may not import {module}, a layer above" if (_row(room) or 0) > (_row(own) or 0) else ""


def _row(room: str) -> int | None:
    return next((row for row, rooms in enumerate(ROOMS) if room in rooms), None)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each import of a file with its line; `from a import b` is a.b if a is one of our packages."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module in (*_PRODUCTS, "orchestrator", "runtime"):
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
