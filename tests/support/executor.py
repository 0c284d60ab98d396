"""The client of TensorRT-LLM's executor over the stand-in in tests/standin; no engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from native.response_memory import NativeMemory
from orchestrator.core.context import Context
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.drafting import Limits
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import NO_HEAD_INPUT, DraftResponse, HeadInput, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.registry import select_method
from runtime.trtllm.client import TrtllmClient
from runtime.trtllm.executor.build_executor import build_target
from tests.support.tiny_models import VOCAB_SIZE

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 32
LIMITS = Limits(NUM_TOKENS, 200, 64)
LIMIT_S = 300.0
GREEDY = Sampling(rule=Rule.ENGINE)


def sampled(*values: float, **named: Any) -> Sampling:
    """Return a sampling under the executor's own rule."""
    return Sampling(*values, **{"rule": Rule.ENGINE, **named})


class serving:  # noqa: N801
    """A target's client for the duration of a with statement."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.client, self.manifest = build_target(config_of(folder, **keys))

    def __enter__(self) -> TrtllmClient[StepRequest]:
        return self.client

    def __exit__(self, *error: object) -> None:
        self.client.close()


def config_of(folder: Path, **keys: Any) -> ServingConfig:
    """Return the deployment of a target's engine."""
    return ServingConfig(**{"target": str(folder), "engine": "tensorrt_llm", **keys})


def standin(client: TrtllmClient[Any]) -> Any:
    """Return the stand-in executor of a client, to control it."""
    return client._transport.executor


class ScriptedDrafter:
    """A draft model that knows the text, and gets every fifth token wrong."""

    use = None
    has_given_up = False

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def begin(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT) -> None:
        pass

    def propose(
        self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT
    ) -> DraftResponse:
        start = len(context.output)
        chain = self.text[start : start + budget.max_nodes]
        return DraftResponse(
            TokenTree.chain([(t + 1) % VOCAB_SIZE if (start + i) % 5 == 4 else t for i, t in enumerate(chain)])
        )

    def close(self) -> None:
        pass


def proposer_of(
    method: str, parameters: dict[str, Any] | None = None, text: list[int] | None = None, inside: str = ""
) -> Any:
    """Return a method's proposer. text: what it may know. inside: the method with which the engine itself drafts."""
    memory = NativeMemory(1000)
    memory.learn("", text or [])
    chosen = select_method(method, json.dumps(parameters or {}), frozenset({"draft"}), {}, inside)
    return chosen.proposer(
        ProposerDependencies(
            drafter_client=lambda name: ScriptedDrafter(text or []),
            vocab_size=VOCAB_SIZE,
            prediction=tuple(text or []),
            memory=memory.of(""),
        )
    )


def request(
    ids: list[int],
    drafts: list[int] | TokenTree = [],  # noqa: B006
    sampling: Sampling = GREEDY,
    options: StepOptions = StepOptions(),  # noqa: B008
    sequence_id: int = 1,
    prompt_len: int | None = None,
) -> StepRequest:
    """Return a step after `ids`, all of them prompt unless `prompt_len` says otherwise."""
    context = Context(ids[:prompt_len])
    context.commit(ids[len(context) :])
    tree = drafts if isinstance(drafts, TokenTree) else TokenTree.chain(drafts)
    return StepRequest(delta_of(context, 0, sequence_id, ""), tree, sampling, options, 60_000)
