"""The drafters that a deployment names, warm and in the target's process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import ConfigError
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.methods import DRAFTERS
from runtime.engine.calls import WARM_UP_LIMIT_S
from runtime.engine.local_drafter import LocalDrafter
from runtime.engine.torch_engine import draft_warm_up, hidden_states_of, load_draft
from runtime.models.heads.build_heads import head_warm_up, load_engine


def load_drafters(config: ServingConfig) -> dict[str, LocalDrafter]:
    """Return the drafters by their keys in serving.toml; raises ConfigError if one cannot be served."""
    return {name: _load(name, config) for name in DRAFTERS if getattr(config, name)}


def reloaded(
    drafters: Mapping[str, LocalDrafter], loaded: ServingConfig, config: ServingConfig, changed: Collection[str]
) -> dict[str, LocalDrafter]:
    """Return the drafters after a reload: those of `changed` keys loaded again, the others as they were.

    loaded: the configuration with which the target was loaded. A drafter that is no longer named stays for the running
    requests. Raises ConfigError if one cannot be served.
    """
    if hidden_states_of(config) & ~hidden_states_of(loaded):
        raise ConfigError(
            "a head reads hidden states that the target does not keep, because it was loaded without such a head: "
            "restart the replicas one after another (a rolling restart; keys medusa, eagle, eagle3, redrafter)"
        )
    found = dict(drafters)
    for name in DRAFTERS:
        if name in changed and getattr(config, name):
            found[name] = _load(name, config)
            if name in drafters:
                found[name].counts = drafters[name].counts
    return found


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
