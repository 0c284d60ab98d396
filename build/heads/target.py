"""The frozen target: one pass computes everything that heads learn from; it knows nothing of heads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from build.errors import BuildError
from orchestrator.core.errors import ConfigError, first_line
from runtime.models.features import layers_of
from runtime.models.heads.checkpoint.target_tables import fingerprint
from runtime.models.native.families import kv_numbers
from runtime.models.stock import read_pretrained


class Batch(NamedTuple):
    """Windows of text with the target's states and distributions; row i stands for the prefix 0 … i.

    tokens: (B, n + 1) int64. last: (B, n, d) after the final norm. layers: (B, n, 3d), divided by the target's
    layer_scale, or (B, n, 0) if no head reads them. p: (B, n, V), row i is the distribution of token i + 1.
    """

    tokens: Tensor
    last: Tensor
    layers: Tensor
    p: Tensor

    @property
    def num_rows(self) -> int:
        """Return n."""
        return self.last.shape[1]


class FrozenTarget:
    """A causal language model of any family, in evaluation mode, without gradients."""

    def __init__(self, name: str, model: Any, reads_layers: bool = True, identity: str = "") -> None:
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.identity = identity
        self.layer_scale = 1.0
        self._pass = self.model
        self._states: dict[int, Tensor] = {}
        decoder = model.get_decoder()
        decoder.register_forward_hook(self._after_norm)
        layers = layers_of(len(decoder.layers)) if reads_layers else ()
        for place, layer in enumerate(layers, start=1):
            decoder.layers[layer].register_forward_pre_hook(self._before(place))

    @property
    def title(self) -> str:
        """The name of its folder, or its hub id."""
        return Path(self.name).resolve().name if Path(self.name).is_dir() else self.name

    @property
    def config(self) -> PretrainedConfig:
        """Sizes of the text model."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.model.device

    @property
    def embedding(self) -> Tensor:
        """The input embedding, (V, d)."""
        return self.model.get_input_embeddings().weight.detach()

    @property
    def lm_head(self) -> Tensor:
        """The LM head, (V, d)."""
        return self.model.get_output_embeddings().weight.detach()

    def fit_scale(self, tokens: Tensor) -> None:
        """Choose the power of two by which the layers' states are divided, so that they are about 1 on `tokens`.

        Inner states are large (about 16 in the demo target) and would drown what an EAGLE-3 layer adds to them. A power
        of two can be folded into the head's fc without rounding.
        """
        self.layer_scale = 1.0
        layers = self.read(tokens.to(self.device)).layers
        if layers.numel():
            self.layer_scale = 2.0 ** round(float(layers.square().mean().sqrt().log2()))

    def compile(self, enabled: bool = True) -> None:
        """Fuse the small operations of `read`; every new window shape costs minutes of compilation."""
        self._pass = torch.compile(self.model, dynamic=False) if enabled else self.model

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Batch:
        """Compute the states of the first n tokens; tokens: (B, n + 1) int64."""
        logits = self._pass(input_ids=tokens[:, :-1], use_cache=False).logits
        last, *layers = (self._states.pop(place) for place in sorted(self._states))
        features = torch.cat(layers, dim=-1) if layers else last[..., :0]
        return Batch(tokens, last.float(), features.float() / self.layer_scale, logits.float().softmax(-1))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return kv_numbers(self.model.config.get_text_config()) * int(self.model.dtype.itemsize)

    @torch.no_grad()
    def continued(self, tokens: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Append a continuation to each row: greedy, or with a generator sampled at temperature 1.

        tokens: (B, n) → (B, n + count).
        """
        cache, newest = None, tokens
        for _ in range(count):
            output = self.model(input_ids=newest, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.past_key_values, output.logits[:, -1].float()
            if generator is None:
                newest = logits.argmax(-1, keepdim=True)
            else:
                newest = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, newest], dim=1)
        self._states.clear()
        return tokens

    def _after_norm(self, module: nn.Module, args: Any, output: Any) -> None:
        # The hook is on the decoder itself, since its final norm is named differently in each family.
        self._states[0] = output[0]

    def _before(self, place: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._states[place] = args[0]

        return hook


def load_target(name: str, device: str, reads_layers: bool, dtype: str = "float32") -> FrozenTarget:
    """Load the target from a folder or hub id; raises BuildError if it cannot be loaded or has too few layers."""
    try:
        identity = fingerprint(name)
        # On the CPU targets are small, and loaded in float32 their states are float32 too.
        stored = getattr(torch, dtype) if device.startswith("cuda") else torch.float32
        model = read_pretrained(AutoModelForCausalLM, name, dtype=stored)
        return FrozenTarget(name, nn.Module.to(model, device), reads_layers, identity)
    except (ConfigError, AttributeError, OSError, ValueError, RuntimeError) as error:
        raise BuildError(f"the target {name} cannot be used: {first_line(error)}") from error


@contextmanager
def computing_in(dtype: str, device: torch.device) -> Iterator[None]:
    """Compute matrix products in `dtype` and sums in float32."""
    with warnings.catch_warnings(), torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # intended
        yield
