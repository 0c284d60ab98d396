"""The package tensorrt_llm, which is imported when an engine is loaded: only NVIDIA's container has it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.core.errors import ConfigError, first_line
from orchestrator.core.methods import BUILD_MODES
from orchestrator.deployment.engine_manifest import Manifest, lookahead_sizes
from orchestrator.deployment.engine_trees import TREES, check_tree, read_tree

#: The releases with compiled engines and the names that are used here (`max_tokens`, `seed`, `min_tokens`).
RELEASES = ("1.0", "1.1", "1.2")
#: The program that runs a rank of an engine for several GPUs: in Triton's container, and in the package's own folder.
WORKER, PACKAGED_WORKER = Path("/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"), "bin/executorWorker"


class Library(NamedTuple):
    """api: the module tensorrt_llm.bindings.executor. version, folder: of the package."""

    api: Any
    version: str
    folder: Path = Path()


def load_library(image: str) -> Library:
    """Import the package; raises ConfigError, naming the container, when it is missing or of another release."""
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

    share: requests that begin with the same tokens share KV blocks.
    """
    api, parallel = library.api, _parallel(library, manifest)
    decoding = _decoding(api, manifest)
    # The tokens that the plan has found room for; without a plan, the library's own default.
    planned = manifest.plan.get("servers", {}).get(manifest.role, {}).get("max_tokens_in_paged_kv_cache")
    try:
        config = api.ExecutorConfig(
            1,
            kv_cache_config=api.KvCacheConfig(enable_block_reuse=share, max_tokens=int(planned) if planned else None),
            # For log-probabilities; they are copied only for requests that ask for them.
            gather_generation_logits=manifest.role == "target" and manifest.mode not in BUILD_MODES,
            decoding_config=decoding,
            **parallel,
        )
        return api.Executor(str(folder), api.ModelType.DECODER_ONLY, config)
    except Exception as error:
        raise ConfigError(f"TensorRT-LLM cannot load the engine {folder}: {first_line(error)}") from error


def _parallel(library: Library, manifest: Manifest) -> dict[str, Any]:
    """Return the argument for an engine on several GPUs: MPI spawns one process for each GPU."""
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
    # The plan lays every engine on the first GPUs.
    devices = list(range(manifest.num_ranks))
    return {"parallel_config": api.ParallelConfig(mpi, mode, devices, None, orchestrator)}


def _decoding(api: Any, manifest: Manifest) -> Any:
    """Return the decoding configuration with Lookahead's sizes or a tree; None when the engine needs neither.

    Raises ConfigError: a tree that the engine was not built for.
    """
    method = BUILD_MODES.get(manifest.mode, "")
    if method == "lookahead":
        return api.DecodingConfig(lookahead_decoding_config=api.LookaheadDecodingConfig(*lookahead_sizes(manifest)))
    if method not in TREES:
        return None
    spec = manifest.plan.get("spec", {})
    paths = read_tree(spec.get("choices", ""))
    check_tree(method, paths, manifest.max_draft_len, spec)
    if not paths:  # the library has a tree of its own
        return None
    if method == "eagle":
        return api.DecodingConfig(eagle_config=api.EagleConfig(paths))
    return api.DecodingConfig(medusa_choices=paths)
