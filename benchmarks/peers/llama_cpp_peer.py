"""llama.cpp in this process as a runner: plain, with its prompt lookup, and with a draft model.

It computes with the same weights (`gguf_file.py`), through the package llama-cpp-python, an optional extra: its plain
loop, its `LlamaPromptLookupDecoding`, and its interface for draft models over a second model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from benchmarks.peers.gguf_file import DTYPES, write_gguf
from benchmarks.samples import Run
from benchmarks.traffic import Prompt
from orchestrator.core.deployment.gguf_file import is_gguf
from runtime.models.stock import read_pretrained

#: Draft length and longest n-gram of the server's prompt_lookup, for an equal comparison.
LOOKUP = {"max_ngram_size": 3, "num_pred_tokens": 10}
#: Draft length of the server's draft_model.
DRAFT_LEN = 3
CONTEXT = 2048

Ids = npt.NDArray[np.intc]


@dataclass(frozen=True)
class LlamaCpp:
    """Implements `Runner` over a llama.cpp model. eos_id: the token that ends a text."""

    name: str
    model: Any
    tokenizer: Any
    eos_id: int

    def fits(self, prompt: Prompt) -> bool:
        """Return True: the peer needs nothing but the prompt."""
        return True

    def run(self, prompt: Prompt, max_tokens: int) -> Run:
        """Continue a prompt greedily from an empty cache and measure it."""
        prompt_ids = self.tokenizer(prompt.text).input_ids
        self.model.reset()
        self.model.num_passes = 0
        ids: list[int] = []
        times_s: list[float] = []
        began_s = time.perf_counter()
        for token in itertools.islice(self.model.generate(prompt_ids, temp=0.0), max_tokens):
            times_s.append(time.perf_counter())
            ids.append(token)
            if token == self.eos_id:
                break
        return Run(
            ids=tuple(ids),
            num_steps=self.model.num_passes,
            num_accepted=len(ids) - self.model.num_passes,
            first_token_s=times_s[0] - began_s,
            decode_tokens=len(ids) - 1,
            decode_s=times_s[-1] - times_s[0],
        )


def load_peers(target: str, draft: str, folder: Path, num_threads: int) -> list[LlamaCpp]:
    """Convert the deployment's checkpoints into `folder` and load them in each dtype.

    Raises ImportError if llama-cpp-python or gguf is not installed.
    """
    tokenizer = read_pretrained(AutoTokenizer, target)
    # A GGUF file is served as it is, by both.
    return [
        LlamaCpp(f"llama.cpp {dtype}".rstrip() + suffix, model, tokenizer, tokenizer.eos_token_id)
        for dtype in ([""] if is_gguf(target) else DTYPES)
        for suffix, model in _models(target, draft, folder, dtype, num_threads)
    ]


def _models(target: str, draft: str, folder: Path, dtype: str, num_threads: int) -> Iterator[tuple[str, Any]]:
    from llama_cpp import llama_speculative

    load = partial(_load, folder=folder, dtype=dtype, num_threads=num_threads)
    yield "", load(target)
    yield " prompt lookup", load(target, draft_model=llama_speculative.LlamaPromptLookupDecoding(**LOOKUP))
    if draft:
        yield " draft model", load(target, draft_model=_drafting(load(draft)))


def _load(checkpoint: str, folder: Path, dtype: str, num_threads: int, draft_model: Any = None) -> Any:
    """Return a llama.cpp model that counts its passes in `num_passes`."""
    from llama_cpp import Llama

    file = folder / f"{Path(checkpoint).name}-{dtype}.gguf" if dtype else Path(checkpoint)
    if not file.exists():
        write_gguf(checkpoint, file, dtype)
    threads = {"n_threads": num_threads, "n_threads_batch": num_threads}
    model: Any = Llama(str(file), n_ctx=CONTEXT, draft_model=draft_model, verbose=False, **threads)
    evaluate = model.eval

    def counted(tokens: Any) -> None:
        model.num_passes += 1
        evaluate(tokens)

    model.eval, model.num_passes = counted, 0
    return model


def _drafting(model: Any) -> Callable[..., Ids]:
    """Return a draft model of llama-cpp-python that drafts DRAFT_LEN tokens greedily."""

    def draft(input_ids: Ids, /, **_: Any) -> Ids:
        return np.fromiter(itertools.islice(model.generate(input_ids.tolist(), temp=0.0), DRAFT_LEN), np.intc)

    return draft
