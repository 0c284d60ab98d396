"""The methods that the playground offers: those that need no drafter, and those whose drafter a replica has."""

from __future__ import annotations

import asyncio

from gateway.replicas import Replicas
from gateway.triton import ReplicaError, TritonClient

#: The longest wait for the one token that shows whether a method is served.
LIMIT_S = 5.0

#: Methods (docs/protocol.md), each with the drafter that it needs; the unions are examples of what can be joined.
METHODS = {
    "none": "",
    "auto": "",
    "prompt_lookup": "",
    "suffix": "",
    "ngram": "",
    "lookahead": "",
    "jacobi": "",
    "recycling": "",
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
    """Return the methods that a replica serves; it refuses those whose drafter it has not loaded."""
    methods = {drafter: method for method, drafter in METHODS.items()}
    replica = next((replica for replica in replicas.all.values() if replica.is_ready), None)
    served = {""}
    if replica:
        drafters = sorted(set(methods) - {""})
        answers = await asyncio.gather(*(_is_served(replica.client, methods[drafter]) for drafter in drafters))
        served |= {drafter for drafter, is_served in zip(drafters, answers, strict=True) if is_served}
    return [method for method, drafter in METHODS.items() if drafter in served]


async def _is_served(client: TritonClient, method: str) -> bool:
    """Return whether a replica generates a token under a method."""
    inputs = {"text_input": "a", "max_tokens": 1, "speculation": method, "timeout_ms": int(1000 * LIMIT_S)}
    try:
        async for _ in client.stream(inputs, LIMIT_S, LIMIT_S):
            pass
    except ReplicaError:
        return False
    return True
