"""One deployment: `serving.toml` and `SERVING_<KEY>` in the environment; every key with its default.

The launcher, the engines and the orchestrator all read it here. It knows nothing of models and opens no checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from orchestrator.core.declarations import Declaration, parse_text, read_toml, validate
from orchestrator.core.errors import ConfigError, RequestError, abbreviated
from orchestrator.core.methods import DRAFTERS, METHODS, PROPOSED, find_methods
from orchestrator.core.tree import MAX_NODES

PREFIX = "SERVING_"
#: The environment variable with the folder in which the public models share `max_running` (docs/operations.md).
STATE_FOLDER = "SPECSERVE_STATE"
#: The environment variable with the secret that calls of the engine models must carry; if it is unset, anyone may call.
ENGINE_KEY = "SPECSERVE_ENGINE_KEY"
#: The launcher's environment variable with the number of threads on which Triton makes the calls of each of its models.
CALL_THREADS = "SPECSERVE_CALL_THREADS"
#: Names the environment variable with the log level of the models' processes; the launcher sets it.
LOG_LEVEL = "SPECSERVE_LOG_LEVEL"
#: The keys that name a model: a folder, a hub id (`owner/name`), or empty = not loaded.
CHECKPOINTS = ("target", *DRAFTERS)
#: All keys that name a folder or a hub id; relative paths start at the file's folder.
FOLDERS = (*CHECKPOINTS, "ngram_tables", "corpus_index")
#: The engines that run TensorRT-LLM's engine folders, as the builder makes them.
Compiled = Literal["tensorrt_llm", "tensorrtllm_backend"]
Engine = Literal["torch", Compiled, "llm_api"]
COMPILED: tuple[str, ...] = get_args(Compiled)
#: The model of NVIDIA's backend behind each of ours, with engine = "tensorrtllm_backend".
BACKEND_MODELS = {"target": "tensorrt_llm", "draft": "tensorrt_llm_draft"}
#: The default of `draft_max_sequences`, for which docs/load.md gives the reason.
DRAFT_MAX_SEQUENCES = 4
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Not keys: the file's own path, and what Kubernetes injects for a Service that is named `serving`.
_FOREIGN = re.compile(r"SERVING_(CONFIG|SERVICE_.*|PORT|PORT_.*)")


class ServingConfig(Declaration):
    """A deployment. `load_config` makes one, whose paths are absolute.

    docs/configuration.md is made from this class by `make configuration`: a `#` line begins a group of keys, and the
    `#:` lines above a key say what it means.
    """

    # Models
    #: the model whose text is served: a folder, a GGUF file or a hub id (`owner/name`)
    target: str
    #: the draft model of the method `draft_model`: a folder, a GGUF file or a hub id; empty = not loaded
    draft: str = ""
    #: the heads of the method `medusa`: a folder or a hub id; empty = not loaded
    medusa: str = ""
    #: the head of the methods `eagle` and `eagle2`: a folder or a hub id; empty = not loaded
    eagle: str = ""
    #: the head of the method `eagle3`: a folder or a hub id; empty = not loaded
    eagle3: str = ""
    #: the head of the method `redrafter`: a folder or a hub id; empty = not loaded
    redrafter: str = ""

    # Engine
    #: what runs the models: `torch`, or one of the three ways to run TensorRT-LLM (docs/tensorrt-llm.md)
    engine: Engine = "torch"
    #: host and port of `trtllm-serve --grpc`, for the engine `llm_api`
    llm_api_address: str = "127.0.0.1:8010"
    #: where the models run; `cuda:N` is the GPU with the number N
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$", description="cpu, cuda or cuda:N")
    #: the number format of the weights and the computation; `float64` is the exact test mode (docs/numerics.md)
    dtype: Literal["float64", "float32", "bfloat16", "int8"] = "float32"
    #: what computes models and heads on a CPU: `auto` = native code where it supports them, else torch; `native` =
    #: native code, and a model that it does not support is refused (docs/numerics.md, Native forward pass)
    kernels: Literal["auto", "native", "torch"] = "auto"
    #: memory of the target's KV blocks, in MiB
    kv_memory_mb: int = Field(512, ge=1, le=1 << 20)
    #: tokens of a KV block
    block_tokens: int = Field(16, ge=1, le=512)
    #: requests with a common prefix share KV blocks
    prefix_sharing: bool = True
    #: tokens of long prompts that a pass reads: more let prompts begin sooner, and texts that are running wait longer
    #: for it; 0 = 256 on a CPU, 2048 on a GPU
    max_pass_tokens: int = Field(0, ge=0, le=4096)

    # Requests
    #: maximum sequences that run at once; each has a thread
    max_running: int = Field(32, ge=1, le=256)
    #: requests that wait beyond those, per public model; more are refused (docs/operations.md, Refusals)
    max_waiting: int = Field(64, ge=0, le=65536)
    #: requests of one `cache_salt` that run at once (docs/operations.md, Who goes first); 0 = as many as `max_running`
    max_running_per_salt: int = Field(0, ge=0, le=256)
    #: tokens that the running requests of one `cache_salt` may come to, prompts and `max_tokens` together
    #: (docs/operations.md, Who goes first); 0 = any number
    max_running_tokens_per_salt: int = Field(0, ge=0, le=1 << 30)
    #: the most that a request may ask for as `max_tokens`
    max_tokens_limit: int = Field(4096, ge=1, le=1 << 20)
    #: `max_tokens` of a request that does not set it; at most `max_tokens_limit`
    default_max_tokens: int = Field(128, ge=1, le=1 << 20)
    #: deadline of a request that does not set one; at most `max_timeout_ms`
    request_timeout_ms: int = Field(60_000, ge=1, le=86_400_000)
    #: the longest deadline: a longer `timeout_ms` of a request counts as this; the launcher's own probe asks
    #: for half of `SPECSERVE_HANG_LIMIT_S`
    max_timeout_ms: int = Field(86_400_000, ge=10_000, le=86_400_000)
    #: requests may ask for output that matches a JSON schema or an expression (docs/operations.md, Structured output)
    structured_output: bool = True
    #: more names of the model `speculative`, joined by commas, for clients that ask for another (docs/clients.md, Other
    #: names of the model)
    aliases: str = ""

    # Drafts
    #: the drafting method of a request that does not name one; `+` joins the methods of a union (docs/methods/union.md)
    default_speculation: str = "auto"
    #: maximum draft nodes of a tree, root not counted
    max_nodes: int = Field(MAX_NODES, ge=1, le=MAX_NODES)
    #: how long a step waits for a drafter before it continues without drafts
    draft_timeout_ms: int = Field(250, ge=1, le=60_000)
    #: a drafter drafts only while at most so many sequences share the target's passes: the more there are, the dearer
    #: each row of a draft (docs/protocol.md, Drafters under load)
    draft_max_sequences: int = Field(DRAFT_MAX_SEQUENCES, ge=1, le=4096)
    #: where drafting happens: `colocated` = in the target's process, which then has the drafters and runs several steps
    #: per call (docs/wire.md, Runs); `separate` = in the loop, and each drafter is a Triton model of its own, as always
    #: with compiled engines
    placement: Literal["colocated", "separate"] = "colocated"
    #: folder of token statistics for the method `ngram` (docs/methods/ngram.md, Tables); empty = not loaded
    ngram_tables: str = ""
    #: folder of indexed text for `auto`, `suffix` and `ngram` to draft from (docs/methods/suffix.md, Corpus); empty =
    #: none
    corpus_index: str = ""
    #: tokens of earlier responses that `auto`, `suffix` and `ngram` draft from (docs/operations.md, Memory); 0 = off
    remember_tokens: int = Field(0, ge=0, le=4_000_000)

    @property
    def is_colocated(self) -> bool:
        """True if the target's process drafts; then it has the drafters, too."""
        return self.placement == "colocated" and self.engine == "torch"

    @property
    def drafters(self) -> tuple[str, ...]:
        """The keys of the drafters that it names."""
        return tuple(name for name in DRAFTERS if getattr(self, name))


def load_config(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> ServingConfig:
    """Read a deployment: `SERVING_<KEY>` in the environment overrides the file, which overrides the defaults.

    Args:
        path: the TOML file; relative paths in it, and in the environment, start at its folder.
        environ: where `SERVING_<KEY>` is looked up.
    Raises:
        ConfigError: the file is unreadable, a key is unknown, a value is not allowed, or there is no target.
    """
    file = Path(os.path.abspath(path))  # not resolve(): a mounted ConfigMap is a chain of links
    variables = {
        name.removeprefix(PREFIX).lower(): name
        for name in environ
        if name.startswith(PREFIX) and not _FOREIGN.fullmatch(name)
    }

    def where(key: str) -> str:
        return f"environment variable {variables[key]}" if key in variables else f"key {key} in {file}"

    values = read_toml(file, "deployment")
    values |= {key: parse_text(ServingConfig, key, environ[name]) for key, name in variables.items()}
    if "runs" in values:
        raise ConfigError(f'runs has become placement: "colocated" for true, "separate" for false ({where("runs")})')
    config = validate(ServingConfig, {"target": "", **values}, where)
    if not config.target:
        raise ConfigError(f"target is missing: name the model to serve, a folder or a hub id (key target in {file})")
    _check_consistent(config, file)
    paths = {key: resolved(getattr(config, key), file.parent, where(key)) for key in FOLDERS}
    return config.model_copy(update=paths)


def resolved(value: str, folder: Path, where: str) -> str:
    """Return an absolute path, or `value` itself if it is empty or a hub id; ConfigError for an unknown user's ~.

    folder: where a relative path starts. where: names the place of the value in the error message.
    """
    try:
        path = folder / Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{abbreviated(value)} names no folder: {error} ({where})") from None
    is_hub_id = _HUB_ID.fullmatch(value) and not path.parent.exists()
    return value if not value or is_hub_id else os.path.abspath(path)


def _check_consistent(config: ServingConfig, file: Path) -> None:
    """Raise ConfigError for values that exclude each other."""
    if config.default_max_tokens > config.max_tokens_limit:
        raise ConfigError(
            f"default_max_tokens must be in 1..{config.max_tokens_limit} (max_tokens_limit), "
            f"got {config.default_max_tokens} ({file})"
        )
    if config.request_timeout_ms > config.max_timeout_ms:
        raise ConfigError(
            f"request_timeout_ms must be in 1..{config.max_timeout_ms} (max_timeout_ms), "
            f"got {config.request_timeout_ms} ({file})"
        )
    _check_drafters(config, file)
    _check_default(config, file)


def _check_drafters(config: ServingConfig, file: Path) -> None:
    """Raise ConfigError for a drafter that the engine never calls."""
    if config.engine == "llm_api" and (drafters := [key for key in CHECKPOINTS[1:] if getattr(config, key)]):
        raise ConfigError(
            f"engine 'llm_api' drafts by itself and loads no drafter (key {drafters[0]} in {file}; "
            "pass it to python -m build.trtllm.llm_api)"
        )
    for key in CHECKPOINTS[2:]:
        if config.engine != "torch" and getattr(config, key):
            raise ConfigError(
                f"{key} is for engine = 'torch', not for {config.engine!r}, whose engines contain their heads "
                f"(key {key} in {file})"
            )


def _check_default(config: ServingConfig, file: Path) -> None:
    """Raise ConfigError if no request could have the default method, or if it lacks its drafter or statistics."""
    # The LLM API's method, named only in its engine's file, may be one for which this server has no proposer.
    known = tuple(METHODS) if config.engine == "llm_api" else PROPOSED
    try:
        methods = find_methods(config.default_speculation, f"key default_speculation in {file}", known)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    for method in methods:
        # A compiled engine may draft by itself; the LLM API always does, even with a draft model.
        drafts_outside = config.engine == "torch" or (method.drafter == "draft" and config.engine != "llm_api")
        if method.drafter and drafts_outside and not getattr(config, method.drafter):
            raise ConfigError(
                f"default_speculation {method.name!r} needs the key {method.drafter}, which is empty ({file})"
            )
        if method.name == "ngram" and not (config.ngram_tables or config.corpus_index or config.remember_tokens):
            raise ConfigError(
                f"default_speculation {method.name!r} needs the key ngram_tables, corpus_index or "
                f"remember_tokens; all are off ({file})"
            )
