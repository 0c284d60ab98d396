"""What a reload changes: settings of a running deployment beside those of its file, and the files that they name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from orchestrator.core.errors import ConfigError, shown
from orchestrator.deployment.config import CHECKPOINTS, ServingConfig
from orchestrator.deployment.reload import live_keys

#: The keys that name files.
FOLDERS = (*CHECKPOINTS, "ngram_tables")

Stamps = dict[str, int]


def stamps_of(config: ServingConfig) -> Stamps:
    """Return for each key that names a folder when its files were last changed; 0 for hub ids and empty keys."""
    return {key: _newest(getattr(config, key)) for key in FOLDERS}


def _newest(folder: str) -> int:
    if not folder or not Path(folder).is_dir():
        return 0
    return max((file.stat().st_mtime_ns for file in Path(folder).iterdir() if file.is_file()), default=0)


def changed_keys(before: ServingConfig, after: ServingConfig, old: Stamps, new: Stamps) -> list[str]:
    """Return the keys whose value has changed, or the files that it names.

    Raises ConfigError for one that a running server cannot change.
    """
    changed = [key for key in ServingConfig.model_fields if getattr(before, key) != getattr(after, key)]
    changed += [key for key in FOLDERS if key not in changed and old[key] != new[key]]
    allowed = live_keys(before)
    if fixed := [key for key in changed if key not in allowed]:
        raise ConfigError(
            f"{described(before, after, fixed[:1])}: {fixed[0]} cannot be changed while the server runs; start the "
            f"replicas anew, one after another (a rolling restart; a reload may change {', '.join(allowed)})"
        )
    return changed


def described(before: ServingConfig, after: ServingConfig, changed: Iterable[str]) -> str:
    """Return in words what has changed."""
    words = []
    for key in changed:
        old, new = getattr(before, key), getattr(after, key)
        words.append(f"{key} {shown(old)} -> {shown(new)}" if old != new else f"{key} (its files)")
    return ", ".join(words)
