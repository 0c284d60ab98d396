"""The methods that the playground offers: those in the public model itself, and those with a loaded drafter."""

from __future__ import annotations

import asyncio

from gateway.replicas import Replicas

#: Methods (docs/protocol.md), each with the Triton model that it needs; unions as examples of what may be joined.
METHODS = {
    "none": "",
    "prompt_lookup": "",
    "suffix": "",
    "ngram": "",
    "lookahead": "",
    "jacobi": "",
    "predicted": "",
    "draft_model": "draft",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle2": "eagle",
    "eagle3": "eagle3",
    "redrafter": "redrafter",
    "prompt_lookup+suffix": "",
    "prompt_lookup+eagle2": "eagle",
    "suffix+eagle3": "eagle3",
}


async def served_methods(replicas: Replicas) -> list[str]:
    """Return the methods whose drafter a replica has loaded; the others are refused by name if they are requested."""
    replica = next((replica for replica in replicas.all.values() if replica.is_ready), None)
    if replica is None:
        return [method for method, model in METHODS.items() if not model]
    drafters = sorted(set(METHODS.values()) - {""})
    loaded = await asyncio.gather(*(replica.client.is_ready(model) for model in drafters))
    ready = {model for model, is_ready in zip(drafters, loaded, strict=True) if is_ready} | {""}
    return [method for method, model in METHODS.items() if model in ready]
