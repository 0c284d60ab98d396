"""The stock model of transformers in this process: the reference that served texts are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, logging

from orchestrator.core.arrays import FloatArray
from runtime.models.fused import fuse_norms
from runtime.models.stock import read_pretrained


class StockModel:
    """A checkpoint as transformers runs it, one causal forward pass per call, without a cache.

    exact_norms: in float64, replace the stock norms, which round to float32 internally.
    """

    def __init__(self, folder: Path, dtype: str = "float64", exact_norms: bool = True) -> None:
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        model = read_pretrained(
            AutoModelForCausalLM, str(folder), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model: Any = model.eval()
        if dtype == "float64" and exact_norms:
            fuse_norms(self.model)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> FloatArray:
        """Return (V,) float64 logits of the token after `ids`."""
        output = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        result: FloatArray = output.logits[0, -1].double().numpy()
        return result

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> FloatArray:
        """Return (n, d) float64 states after the final norm."""
        output = self.model.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        result: FloatArray = output.last_hidden_state[0].double().numpy()
        return result

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the output of `generate` at temperature 0 after `ids`."""
        prompt = torch.tensor([list(ids)])
        text = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=num_tokens
        )
        output: list[int] = text[0, len(ids) :].tolist()
        return output
