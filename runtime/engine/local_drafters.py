"""The drafters that a deployment names, warm and in the target's process."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.methods import DRAFTERS
from runtime.engine.calls import WARM_UP_LIMIT_S
from runtime.engine.local_drafter import LocalDrafter
from runtime.engine.torch_engine import draft_warm_up, load_draft
from runtime.models.heads.build_heads import head_warm_up, load_engine


def load_drafters(config: ServingConfig) -> dict[str, LocalDrafter]:
    """Return the drafters by their keys in serving.toml; raises ConfigError if one cannot be served."""
    return {name: _load(name, config) for name in DRAFTERS if getattr(config, name)}


def _load(name: str, config: ServingConfig) -> LocalDrafter:
    if name == "draft":
        draft = load_draft(config)
        return _warm(LocalDrafter(draft), draft_warm_up(draft))
    _, head = load_engine(name, config)
    return _warm(LocalDrafter(head), head_warm_up(head))


def _warm(drafter: LocalDrafter, calls: list[DraftRequest]) -> LocalDrafter:
    for call in calls:
        drafter.draft(replace(call, deadline_ms=int(1000 * WARM_UP_LIMIT_S)))
        drafter.release(call.delta.sequence_id)
    return drafter
