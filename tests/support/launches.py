"""What a pass of the torch engine asks of a GPU, counted on the CPU.

A GPU launches a kernel for each operation that is not a view, and waits where the host reads a result. Both depend only
on the code, so they are counted without a GPU: for a small random Llama in float64, whose linear layers are torch's own
as on a GPU, whose segments attend in groups as there, and with the torch code of sampling.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from runtime.engine.calls import EngineCall
from runtime.engine.kv import batch
from runtime.engine.paged import PagedModel
from runtime.engine.sampling import served
from runtime.engine.target import TargetEngine
from runtime.models.load import load_model

NUM_LAYERS, VOCAB_SIZE, BLOCK_TOKENS, DEPTH = 4, 512, 16, 4
#: Contexts are this long and up to 9 tokens longer: no step fills a block, which would be found by content afterwards.
NUM_CONTEXT = 2 * BLOCK_TOKENS + 1
#: Operations without a kernel: allocations, and what wraps or reads a host tensor.
WITHOUT_KERNEL = ("empty", "lift_fresh", "_local_scalar_dense", "_unsafe_view", "detach")
COPIES = (torch.tensor, torch.as_tensor, Tensor.new_tensor, Tensor.to)
WAITS = (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__, torch.nonzero)
INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class Launches(NamedTuple):
    """ops: operations that are not views. copies: from the host to the device. waits: for the device."""

    ops: int
    copies: int
    waits: int


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += not (func.is_view or name.startswith(WITHOUT_KERNEL))
        return func(*args, **kwargs or {})


class _Transfers(TorchFunctionMode):
    """Counts copies to the device and waits for it, by the functions that are called.

    A list as an index is both, because torch copies it from memory that is not pinned.
    """

    copies = waits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_list = func in INDEXING and _has_list(args[1])
        is_copy = func in COPIES and any(isinstance(x, torch.device) for x in (*args, *(kwargs or {}).values()))
        self.copies += is_list or is_copy or func is Tensor.new_tensor
        self.waits += is_list or func in WAITS
        return func(*args, **kwargs or {})


def _has_list(index: Any) -> bool:
    return any(isinstance(each, list) for each in (index if isinstance(index, tuple) else (index,)))


def count(function: Callable[[], Any]) -> Launches:
    """Return what a call launches."""
    with _Operations() as operations, _Transfers() as transfers:  # type: ignore[no-untyped-call]
        function()
    return Launches(operations.count, transfers.copies, transfers.waits)


@contextmanager
def small_engine() -> Iterator[TargetEngine]:
    """Yield a target engine over a small random Llama that samples in torch, as on a GPU."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(served, "on_cpu", lambda _: False),
        mock.patch.object(batch, "joins", lambda device: True),
    ):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
        model = load_model(folder, "cpu", "float64", kernels="torch")
        yield TargetEngine(PagedModel(model, 64, BLOCK_TOKENS))


class Requests:
    """Requests with contexts of unequal length, whose keys and values are in the cache."""

    def __init__(self, engine: TargetEngine, number: int, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._contexts = [
            [(7919 * place + 31 * request + 13) % VOCAB_SIZE for place in range(NUM_CONTEXT + request % 10)]
            for request in range(number)
        ]
        bare = [TokenTree.bare()] * number
        self._next = [answer.next_token for answer in self.step(bare)]

    def step(self, trees: Sequence[TokenTree]) -> list[Acceptance]:
        """Run a step of every request after its context, all in one pass once the contexts are in the cache."""
        answers: dict[int, Any] = {}
        calls = [
            EngineCall(self._request(i, tree), 1e9, lambda answer, i=i: answers.update({i: answer}))  # type: ignore[misc]
            for i, tree in enumerate(trees)
        ]
        while calls:
            calls = self._engine.advance(calls)
        return [answers[i] for i in range(len(trees))]

    def trees(self) -> list[TokenTree]:
        """Return a tree for each request: a wrong branch, then one that begins with the token that is accepted."""
        wrong = [[(token + 1 + depth) % VOCAB_SIZE for depth in range(DEPTH)] for token in self._next]
        right = [[token, *path[1:]] for token, path in zip(self._next, wrong, strict=True)]
        return [TokenTree.from_paths([*paths]) for paths in zip(wrong, right, strict=True)]

    def _request(self, index: int, tree: TokenTree) -> StepRequest:
        delta = delta_of(Context(self._contexts[index]), 0, 1 + index, "")
        return StepRequest(delta, tree, self._sampling, StepOptions(), 60_000)
