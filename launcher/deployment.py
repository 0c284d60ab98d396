"""Which Triton models a deployment needs, and whether the repository and the checkpoints exist; starts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from orchestrator.core.deployment.checkpoint import missing_config
from orchestrator.core.deployment.config import BACKEND_MODELS, CHECKPOINTS, ServingConfig, load_config
from orchestrator.core.deployment.gguf_file import is_gguf
from orchestrator.core.errors import ConfigError

#: The public models; each is loaded if the repository has it.
PUBLIC = ("speculative", "speculative_unary")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_NAME_LINE = re.compile(r'^name: "(.*)"$', re.MULTILINE)


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
        what = missing_config(value) if Path(value).is_dir() else "it does not exist"
        raise ConfigError(f"the checkpoint folder {value}: {what} (key {key}; a hub id is written owner/name)")


def alias_names(aliases: str, taken: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated list, for clients that expect another server's model name.

    Raises ConfigError for one that is not a name, or is taken.
    """
    names = [name.strip() for name in aliases.split(",") if name.strip()]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"aliases must be names of letters, digits, _ and -, got {name!r} (key aliases)")
        if name in taken or names.count(name) > 1:
            raise ConfigError(f"aliases must be new names, got {name!r}, which is taken (key aliases)")
    return names


def write_aliases(folder: Path, repository: Path, names: Sequence[str]) -> None:
    """Write a model repository with the model `speculative` under these names; its code stays in `repository`."""
    config = (repository / PUBLIC[0] / "config.pbtxt").read_text(encoding="utf-8") if names else ""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.pbtxt").write_text(_NAME_LINE.sub(f'name: "{name}"', config, count=1), "utf-8")
        if not (folder / name / "1").is_symlink():
            (folder / name / "1").symlink_to((repository / PUBLIC[0] / "1").resolve())
