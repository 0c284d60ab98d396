"""What an engine needs to run the steps of a sequence by itself, and the call that takes them."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.drafting import Limits


@dataclass(frozen=True)
class RunOptions:
    """What an engine needs to draft for a sequence by itself, besides its context and its sampling.

    method, config: the drafting method and the JSON of its parameters. prediction: what the client expects as output.
    stop_ids: the run ends after one of these that comes after the first `min_tokens` of the output.
    """

    method: str
    config: str
    limits: Limits
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True)
class TakeSteps:
    """The call for the steps of a run that the caller lacks. prefix_len: number of committed tokens that it has."""

    sequence_id: int
    prefix_len: int
