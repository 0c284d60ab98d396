"""One deployment: `serving.toml` and `SERVING_<KEY>` in the environment; every key stands beside its default.

Stdlib only: the launcher, the engines and the orchestrator read it alike. It knows no model and opens no checkpoint.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from orchestrator.core.errors import ConfigError, unknown_name

PREFIX = "SERVING_"
#: The keys that name a model: a folder, a hub id (`owner/name`), or empty = not loaded.
CHECKPOINTS = ("target", "draft", "medusa", "eagle", "eagle3", "redrafter")
#: The drafter (key and Triton model) that a drafting method asks; the other methods draft in process.
DRAFTER_OF = {
    "draft_model": "draft",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle2": "eagle",
    "eagle3": "eagle3",
    "redrafter": "redrafter",
}
#: What runs the models; COMPILED: from engine folders of TensorRT-LLM, as the builder leaves them.
COMPILED = ("tensorrt_llm", "tensorrtllm_backend", "tensorrt_llm_trees_experimental")
ENGINES = ("torch", *COMPILED, "llm_api")
#: The model of NVIDIA's backend behind each of ours, with engine = "tensorrtllm_backend".
BACKEND_MODELS = {"target": "tensorrt_llm", "draft": "tensorrt_llm_draft"}
METHODS = ("none", "prompt_lookup", "ngram", "suffix", "lookahead", "jacobi", "predicted", *DRAFTER_OF)
#: Methods that only an engine which drafts by itself may have.
ENGINE_SIDE_ONLY = ("mtp",)

_METHOD = rf"({'|'.join((*METHODS, *ENGINE_SIDE_ONLY))})"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Not keys: the file's own path, and what Kubernetes injects beside a Service that is named `serving`.
_FOREIGN = re.compile(r"SERVING_(CONFIG|SERVICE_.*|PORT|PORT_.*)")


def _key(
    default: Any = MISSING,
    *,
    low: int = 0,
    high: int = 0,
    allowed: tuple[str, ...] = (),
    pattern: str = "",
    path: bool = False,
) -> Any:
    """Declare a key: its default (none = required), and what its values may be."""
    rules = {"low": low, "high": high, "allowed": allowed, "pattern": pattern, "path": path}
    return field(default=default, metadata=rules)


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """A deployment. `load_config` makes one; its paths are absolute, its values in range."""

    #: the model whose text is served: folder or hub id; required
    target: str = _key(path=True)
    #: drafters, each a folder or a hub id; empty = not loaded
    draft: str = _key("", path=True)
    medusa: str = _key("", path=True)
    eagle: str = _key("", path=True)
    eagle3: str = _key("", path=True)
    redrafter: str = _key("", path=True)
    #: what runs the models
    engine: str = _key("torch", allowed=ENGINES)
    #: cpu, cuda, or one GPU: cuda:0
    device: str = _key("cpu", pattern=r"cpu|cuda(:\d+)?")
    #: float64 is the exact test mode
    dtype: str = _key("float32", allowed=("float64", "float32", "bfloat16"))
    #: memory of the target's KV blocks, in MiB
    kv_memory_mb: int = _key(512, low=1, high=1 << 20)
    #: tokens of a KV block
    block_tokens: int = _key(16, low=1, high=512)
    #: requests that run at once; each is a thread
    max_running: int = _key(32, low=1, high=256)
    #: requests that wait beyond those; more are refused
    max_waiting: int = _key(64, low=0, high=65536)
    #: the most that a request may ask for as max_tokens
    max_tokens_limit: int = _key(4096, low=1, high=1 << 20)
    #: max_tokens of a request that names none
    default_max_tokens: int = _key(128, low=1, high=1 << 20)
    #: most draft nodes of a tree, root not counted
    max_nodes: int = _key(128, low=1, high=128)
    #: the drafting method of a request that names none; a union is joined by +
    default_speculation: str = _key("prompt_lookup", pattern=rf"{_METHOD}(\+{_METHOD})*")
    #: how long a step waits for a drafter before it goes on undrafted
    draft_timeout_ms: int = _key(250, low=1, high=60_000)
    #: deadline of a request that names none
    request_timeout_ms: int = _key(60_000, low=1, high=86_400_000)
    #: folder of token statistics for the method ngram; empty = none
    ngram_tables: str = _key("", path=True)
    #: tokens of earlier responses that suffix and ngram may draft from; 0 = none (docs/operations.md, Memory)
    remember_tokens: int = _key(0, low=0, high=4_000_000)
    #: requests may ask for output that matches a JSON schema or an expression (docs/operations.md, Structured output)
    structured_output: bool = _key(True)
    #: requests with one beginning share KV blocks
    prefix_sharing: bool = _key(True)


def load_config(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> ServingConfig:
    """Read a deployment: environment `SERVING_<KEY>` before file before default.

    Args:
        path: the TOML file; relative paths in it, and in the environment, start at its folder.
        environ: where `SERVING_<KEY>` is looked up.
    Raises:
        ConfigError: unreadable file, unknown key, wrong type, value out of range, no target.
    """
    file = Path(os.path.abspath(path))  # not resolve(): a mounted ConfigMap is a chain of links
    given = {key: (value, f"key {key} in {file}") for key, value in read_toml(file, "deployment").items()}
    given |= _from_environment(environ)
    known = {f.name: f for f in fields(ServingConfig)}
    values: dict[str, Any] = {}
    for key, (value, where) in given.items():
        if key not in known:
            raise ConfigError(unknown_name("key", key, known, where))
        values[key] = _checked(key, value, known[key].type, known[key].metadata, where)
        if known[key].metadata["path"]:
            values[key] = resolved(values[key], file.parent)
    return _consistent(values, file)


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """Return a TOML file's content; raises ConfigError when it cannot be read, `what` saying which file it is."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the {what} file {file}: {error.strerror}") from None
    except ValueError as error:  # bad TOML or bad UTF-8
        raise ConfigError(f"{file} is not TOML: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return {key: (value, where)}; numbers and booleans are parsed as TOML, everything else is text."""
    types = {f.name: f.type for f in fields(ServingConfig)}
    found: dict[str, tuple[Any, str]] = {}
    for name, text in environ.items():
        if name.startswith(PREFIX) and not _FOREIGN.fullmatch(name):
            key = name.removeprefix(PREFIX).lower()
            value = text if types.get(key) == "str" else _scalar(text)
            found[key] = (value, f"environment variable {name}")
    return found


def _scalar(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _checked(key: str, value: Any, type_name: Any, rules: Mapping[str, Any], where: str) -> Any:
    """Return `value` when `key` may have it, else say what is allowed."""
    if type(value).__name__ != type_name:  # exact: True is no int here
        raise ConfigError(f"{key} must be {_WORDS[type_name]}, got {value!r} ({where})")
    if type_name == "int" and not rules["low"] <= value <= rules["high"]:
        raise ConfigError(f"{key} must be in {rules['low']}..{rules['high']}, got {value} ({where})")
    if rules["allowed"] and value not in rules["allowed"]:
        raise ConfigError(unknown_name(key, value, rules["allowed"], where))
    if rules["pattern"] and not re.fullmatch(rules["pattern"], value):
        raise ConfigError(f"{key} must be {_FORMS[key]}, got {value!r} ({where})")
    return value


_WORDS = {"str": "a string", "int": "a whole number", "bool": "true or false"}
_FORMS = {
    "device": "cpu, cuda or cuda:N",
    "default_speculation": f"one of {', '.join((*METHODS, *ENGINE_SIDE_ONLY))}, or a union joined by +",
}


def resolved(value: str, folder: Path) -> str:
    """Return an absolute path, or `value` itself when it is empty or a hub id."""
    path = folder / Path(value).expanduser()
    is_hub_id = _HUB_ID.fullmatch(value) and not path.parent.exists()
    return value if not value or is_hub_id else os.path.abspath(path)


def _consistent(values: dict[str, Any], file: Path) -> ServingConfig:
    """Build the config after the checks that need more than one key."""
    if not values.get("target"):
        raise ConfigError(f"target is missing: name the model to serve, a folder or a hub id (key target in {file})")
    config = ServingConfig(**values)
    if config.default_max_tokens > config.max_tokens_limit:
        raise ConfigError(
            f"default_max_tokens must be in 1..{config.max_tokens_limit} (max_tokens_limit), "
            f"got {config.default_max_tokens} ({file})"
        )
    _check_drafters(config, file)
    _check_default(config, file)
    return config


def _check_drafters(config: ServingConfig, file: Path) -> None:
    """Raise ConfigError for a drafter that the engine would never ask."""
    if config.engine == "llm_api" and (given := [key for key in CHECKPOINTS[1:] if getattr(config, key)]):
        raise ConfigError(
            f"engine 'llm_api' drafts by itself and loads no drafter (key {given[0]} in {file}; "
            "name it to python -m build.trtllm.llm_api)"
        )
    for key in CHECKPOINTS[2:]:
        if config.engine != "torch" and getattr(config, key):
            raise ConfigError(
                f"{key} is for engine = 'torch', not for {config.engine!r}, whose engines have their heads inside "
                f"(key {key} in {file})"
            )


def _check_default(config: ServingConfig, file: Path) -> None:
    """Raise ConfigError for a default method that lacks what it drafts from."""
    for method in config.default_speculation.split("+"):
        drafter = DRAFTER_OF.get(method)
        # A compiled engine may draft by itself; the LLM API does, with a draft model too.
        drafts_outside = config.engine == "torch" or (drafter == "draft" and config.engine != "llm_api")
        if drafter and drafts_outside and not getattr(config, drafter):
            raise ConfigError(f"default_speculation {method!r} needs the key {drafter}, which is empty ({file})")
        if method == "ngram" and not (config.ngram_tables or config.remember_tokens):
            raise ConfigError(
                f"default_speculation {method!r} needs the key ngram_tables or remember_tokens; both are off ({file})"
            )
