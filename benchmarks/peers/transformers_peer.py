"""transformers' `generate` as a runner: plain, with prompt lookup, and with an assistant model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
from transformers.generation.streamers import BaseStreamer

from benchmarks.samples import Run
from benchmarks.traffic import Prompt
from runtime.models.stock import read_pretrained

#: Draft length and longest n-gram of the server's prompt_lookup, for an equal comparison.
LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}


class Clock(BaseStreamer):
    """Records when tokens arrived and how many; the first call of `put` brings the prompt, which is not a step."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Record the tokens of one step."""
        self.times_s.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Do nothing: the last step has been recorded."""


@dataclass(frozen=True)
class Peer:
    """Implements `Runner` over a model in this process."""

    name: str
    model: Any
    tokenizer: Any
    options: dict[str, Any]

    def fits(self, prompt: Prompt) -> bool:
        """Return True: the peer needs nothing but the prompt."""
        return True

    @torch.inference_mode()
    def run(self, prompt: Prompt, max_tokens: int) -> Run:
        """Continue a prompt greedily and measure it."""
        inputs, clock = self.tokenizer(prompt.text, return_tensors="pt"), Clock()
        began_s = time.perf_counter()
        output = self.model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, streamer=clock, **self.options
        )
        ids = tuple(output[0, inputs.input_ids.shape[1] :].tolist())
        times_s, counts = clock.times_s[1:], clock.counts[1:]
        return Run(
            ids=ids,
            num_steps=len(counts),
            num_accepted=len(ids) - len(counts),
            first_token_s=times_s[0] - began_s,
            decode_tokens=len(ids) - counts[0],
            decode_s=times_s[-1] - times_s[0],
        )


def load_peers(target: str, draft: str, dtype: str) -> list[Peer]:
    """Load the deployment's checkpoints for plain decoding, prompt lookup and, with a draft, assisted decoding."""
    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    model, tokenizer = _load(target, dtype), read_pretrained(AutoTokenizer, target)
    peers = [
        Peer("transformers", model, tokenizer, {}),
        Peer("transformers prompt lookup", model, tokenizer, LOOKUP),
    ]
    if draft:
        peers.append(Peer("transformers assisted", model, tokenizer, {"assistant_model": _load(draft, dtype)}))
    return peers


def _load(checkpoint: str | Path, dtype: str) -> Any:
    model: Any = read_pretrained(AutoModelForCausalLM, str(checkpoint), dtype=getattr(torch, dtype))
    return model.eval()
