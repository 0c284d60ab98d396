"""Which Triton models a deployment needs, and whether what they need is there; starts nothing."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config import CHECKPOINTS, ServingConfig
from orchestrator.errors import ConfigError

#: The public models; each is loaded where the repository has it.
PUBLIC = ("speculative", "speculative_unary")


def models_to_load(config: ServingConfig, repository: Path) -> list[str]:
    """Return the Triton models that the deployment names.

    Raises:
        ConfigError: the repository lacks one of them, or a checkpoint's folder is missing.
    """
    named = [key for key in CHECKPOINTS if getattr(config, key)]
    for key in named:
        _check_checkpoint(key, getattr(config, key))
        if not (repository / key / "config.pbtxt").is_file():
            raise ConfigError(
                f"no Triton model {key!r} in {repository}, which has: {_models_in(repository)} (key {key})"
            )
    return named + [name for name in PUBLIC if (repository / name / "config.pbtxt").is_file()]


def _check_checkpoint(key: str, value: str) -> None:
    """Refuse a path without a checkpoint; a hub id is the engine's to find."""
    if Path(value).is_absolute() and not (Path(value) / "config.json").is_file():
        what = "has no config.json" if Path(value).is_dir() else "does not exist"
        raise ConfigError(f"the checkpoint folder {value} {what} (key {key}; a hub id is written owner/name)")


def _models_in(repository: Path) -> str:
    return ", ".join(sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))) or "nothing"
