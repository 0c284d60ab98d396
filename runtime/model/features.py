"""Hidden states for drafting heads, tapped during the forward pass (docs/protocol.md, Which hidden state)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestrator.core.errors import ConfigError
from orchestrator.core.types import HiddenStates

# With fewer layers, two of the three layers that EAGLE-3 reads coincide.
MIN_LAYERS = 7


def layers_of(depth: int) -> tuple[int, int, int]:
    """Return the decoder layers, out of `depth`, whose inputs EAGLE-3 reads (arXiv:2503.01840, section 3.1)."""
    if depth < MIN_LAYERS:
        raise ConfigError(
            f"EAGLE-3 reads the inputs of layers 2, L/2 and L-3; the target has {depth} layers, "
            f"at least {MIN_LAYERS} are needed"
        )
    return 2, depth // 2, depth - 3


class FeatureTap:
    """Collects the hidden states that the deployment's heads read in each pass: LAST, then LAYERS."""

    def __init__(self, model: Any, states: HiddenStates) -> None:
        decoder = model.get_decoder()
        self._states: dict[int, Tensor] = {}
        self._num_last = int(HiddenStates.LAST in states)
        self._hidden_size: int = model.config.get_text_config().hidden_size
        layers = layers_of(len(decoder.layers)) if HiddenStates.LAYERS in states else ()
        self.num_states = self._num_last + len(layers)
        if self._num_last:
            # The hook is on the decoder, because the name of the final norm differs from family to family.
            decoder.register_forward_hook(lambda module, args, output: self._states.update({0: output[0][0]}))
        for place, layer in enumerate(layers, start=1):
            decoder.layers[layer].register_forward_pre_hook(
                lambda module, args, place=place: self._states.update({place: args[0][0]})
            )

    def take(self) -> Tensor:
        """Return the states of the pass, (N, num_states · hidden_size), and forget them."""
        states = [self._states.pop(place) for place in sorted(self._states)]
        return torch.cat(states, dim=-1)

    def columns(self, wanted: HiddenStates) -> slice:
        """Return the columns of the wanted states in the cache; empty unless the cache keeps all of them."""
        num_layers = self.num_states - self._num_last
        if (HiddenStates.LAST in wanted and not self._num_last) or (HiddenStates.LAYERS in wanted and not num_layers):
            return slice(0, 0)
        start = 0 if HiddenStates.LAST in wanted else self._num_last
        stop = self.num_states if HiddenStates.LAYERS in wanted else self._num_last
        return slice(start * self._hidden_size, stop * self._hidden_size)
