"""Which Triton models a deployment needs, and whether the repository and the checkpoints exist; starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from orchestrator.core.deployment.config import BACKEND_MODELS, CHECKPOINTS, ServingConfig, load_config
from orchestrator.core.deployment.gguf_file import is_gguf
from orchestrator.core.errors import ConfigError

#: The public models; each is loaded if the repository has it.
PUBLIC = ("speculative", "speculative_unary")


def load_deployment(path: Path, environ: Mapping[str, str], repository: Path) -> tuple[ServingConfig, list[str]]:
    """Return the settings in a deployment file, and the Triton models that they name; raises ConfigError."""
    config = load_config(path, environ)
    return config, models_to_load(config, repository)


def models_to_load(config: ServingConfig, repository: Path) -> list[str]:
    """Return the Triton models that the deployment names.

    Raises:
        ConfigError: the repository lacks one of them, or a checkpoint's folder is missing.
    """
    named = [key for key in CHECKPOINTS if getattr(config, key)]
    for key in named:
        _check_checkpoint(key, getattr(config, key))
    if config.is_colocated:
        named = ["target"]  # the drafters are in its process
    for key in named:
        _check_model(key, repository, f"key {key}")
    if config.engine == "tensorrtllm_backend":
        backend = [BACKEND_MODELS[key] for key in named if key in BACKEND_MODELS]
        for model in backend:
            _check_model(model, repository, "python -m build.trtllm.repository writes it; key engine")
        named = backend + named
    return named + [name for name in PUBLIC if (repository / name / "config.pbtxt").is_file()]


def python_models(models: Iterable[str], repositories: Sequence[Path]) -> list[str]:
    """Return the models written in Python: only these have a process of their own, which may die."""
    return [name for name in models if any(any((folder / name).glob("*/model.py")) for folder in repositories)]


def _check_model(model: str, repository: Path, where: str) -> None:
    if not (repository / model / "config.pbtxt").is_file():
        models = ", ".join(sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))) or "nothing"
        raise ConfigError(f"no Triton model {model!r} in {repository}, which has: {models} ({where})")


def _check_checkpoint(key: str, value: str) -> None:
    """Raise ConfigError for a path without a checkpoint; the engine looks up hub ids itself."""
    if is_gguf(value) and not Path(value).is_file():
        raise ConfigError(f"the GGUF file {value} does not exist (key {key})")
    if Path(value).is_absolute() and not is_gguf(value) and not (Path(value) / "config.json").is_file():
        what = "has no config.json" if Path(value).is_dir() else "does not exist"
        raise ConfigError(f"the checkpoint folder {value} {what} (key {key}; a hub id is written owner/name)")
