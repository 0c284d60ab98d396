"""The package tensorrt_llm, which only NVIDIA's container has, so it is imported when an engine is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.core.deployment.capabilities import eagle_posterior
from orchestrator.core.deployment.engine_manifest import EXTERNAL, Manifest, lookahead_sizes
from orchestrator.core.deployment.engine_trees import LOOKAHEAD_REQUESTS, TREES, check_tree, read_tree
from orchestrator.core.errors import ConfigError, first_line

#: The releases that have compiled engines and the names used here (`max_tokens`, `seed`, `min_tokens`).
RELEASES = ("1.0", "1.1", "1.2")
#: The program that runs a rank of an engine for several GPUs: in Triton's container, and in the package's own folder.
WORKER, PACKAGED_WORKER = Path("/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"), "bin/executorWorker"


class Library(NamedTuple):
    """The imported package. api: its module bindings.executor. version, folder: of the package."""

    api: Any
    version: str
    folder: Path = Path()


def load_library(image: str) -> Library:
    """Import the package; raises ConfigError, naming the container, if it is missing or the wrong release."""
    try:
        package = importlib.import_module("tensorrt_llm")
        api = importlib.import_module("tensorrt_llm.bindings.executor")
    except ImportError as error:
        raise ConfigError(
            f"engine = 'tensorrt_llm' needs the package tensorrt_llm: run the server in the container {image} ({error})"
        ) from None
    version: str = package.__version__
    if not version.startswith(RELEASES):
        raise ConfigError(
            f"TensorRT-LLM {version} cannot serve compiled engines here; allowed: {', '.join(RELEASES)} "
            f"(run the server in the container {image})"
        )
    return Library(api, version, Path(str(package.__file__)).parent)


def open_executor(library: Library, folder: Path, manifest: Manifest, share: bool) -> Any:
    """Load an engine into an executor of its own; raises ConfigError with the library's error when that fails.

    share: requests with a common prefix share KV blocks.
    """
    _check_served(folder, manifest, share)
    api, parallel = library.api, _parallel(library, manifest)
    decoding = _decoding(api, manifest)
    # The number of tokens that the plan has found room for; without a plan, the library's default.
    planned = manifest.plan.get("servers", {}).get(manifest.role, {}).get("max_tokens_in_paged_kv_cache")
    try:
        config = api.ExecutorConfig(
            1,
            kv_cache_config=api.KvCacheConfig(enable_block_reuse=share, max_tokens=int(planned) if planned else None),
            # Without it a prompt has at most max_num_tokens tokens, and every step sends the whole text as its prompt.
            enable_chunked_context=True,
            # For log-probabilities, and for the probabilities of a draft; copied only for requests that ask for them.
            gather_generation_logits=not manifest.engine_method,
            decoding_config=decoding,
            **parallel,
        )
        return api.Executor(str(folder), api.ModelType.DECODER_ONLY, config)
    except Exception as error:
        raise ConfigError(f"TensorRT-LLM cannot load the engine {folder}: {first_line(error)}") from error


def _check_served(folder: Path, manifest: Manifest, share: bool) -> None:
    """Raise ConfigError for settings that the library would refuse at load or ignore without an error."""
    if manifest.mode == EXTERNAL and not share:  # trtGptModelInflightBatching.cpp, constructor
        raise ConfigError(
            f"the engine {folder} verifies draft tokens, for which TensorRT-LLM demands that KV blocks are reused "
            "(key prefix_sharing: must be true)"
        )
    if manifest.engine_method == "lookahead" and manifest.max_batch_size > LOOKAHEAD_REQUESTS:
        raise ConfigError(
            f"the engine {folder} was built for {manifest.max_batch_size} sequences; TensorRT-LLM stops drafting with "
            f"Lookahead above {LOOKAHEAD_REQUESTS} (build it again with max_batch_size {LOOKAHEAD_REQUESTS})"
        )


def _parallel(library: Library, manifest: Manifest) -> dict[str, Any]:
    """Return the argument for an engine on several GPUs, for which MPI spawns one process per GPU."""
    if manifest.num_ranks == 1:
        return {}
    workers = [WORKER, library.folder / PACKAGED_WORKER]
    worker = next((path for path in workers if path.is_file()), None)
    if worker is None:
        raise ConfigError(
            f"an engine for {manifest.num_ranks} GPUs needs the program that runs its ranks; not found: "
            f"{', '.join(map(str, workers))} (run the server in the container {manifest.image})"
        )
    api, orchestrator = library.api, library.api.OrchestratorConfig(True, str(worker))
    mpi, mode = api.CommunicationType.MPI, api.CommunicationMode.ORCHESTRATOR
    # The plan places every engine on the first GPUs.
    devices = list(range(manifest.num_ranks))
    return {"parallel_config": api.ParallelConfig(mpi, mode, devices, None, orchestrator)}


def _decoding(api: Any, manifest: Manifest) -> Any:
    """Return the decoding configuration with Lookahead's sizes or a tree; None when the engine needs neither.

    The library requires the decoding mode with each of these (decodingConfig.cpp). Raises ConfigError for a tree that
    the engine was not built for.
    """
    method, modes = manifest.engine_method, api.DecodingMode
    spec = manifest.plan.get("spec", {})
    if method == "lookahead":
        sizes = api.LookaheadDecodingConfig(*lookahead_sizes(manifest))
        return api.DecodingConfig(modes.Lookahead(), lookahead_decoding_config=sizes)
    if method == "eagle2":
        return api.DecodingConfig(modes.Eagle(), eagle_config=eagle_config(api, manifest))
    if method not in TREES:
        return None
    paths = read_tree(spec.get("choices", ""))
    check_tree(method, paths, manifest.max_draft_len, spec)
    if method == "eagle" and (paths or spec.get("eagle_posterior")):
        return api.DecodingConfig(modes.Eagle(), eagle_config=eagle_config(api, manifest))
    if not paths:  # the library has a tree of its own
        return None
    return api.DecodingConfig(modes.Medusa(), medusa_choices=paths)


def eagle_config(
    api: Any, manifest: Manifest, choices: Sequence[Sequence[int]] = (), epsilon: float | None = None
) -> Any:
    """Return EAGLE's configuration, for the engine or for one request with a tree or ε of its own.

    A request's configuration replaces all of the engine's (createNewDecoderRequests.cpp), so each is complete; whether
    acceptance is greedy or typical is fixed for the engine, and ε is the request's (runtime/eagleBuffers.cpp).
    """
    spec = manifest.plan.get("spec", {})
    arguments: dict[str, Any] = {}
    if manifest.engine_method == "eagle2":
        arguments = {"use_dynamic_tree": True, "dynamic_tree_max_topK": spec["eagle_top_k"]}
    elif paths := [list(path) for path in choices] or read_tree(spec.get("choices", "")):
        arguments = {"eagle_choices": paths}
    if deployed := eagle_posterior(manifest):
        arguments |= {"greedy_sampling": False, "posterior_threshold": deployed if epsilon is None else epsilon}
    return api.EagleConfig(**arguments)
