"""Hidden states for drafting heads, tapped during the forward pass (docs/wire.md, Which hidden state)."""

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


class FeatureColumns:
    """The layout of the hidden states that a deployment's heads read: LAST, then LAYERS, side by side."""

    def __init__(self, config: Any, states: HiddenStates) -> None:
        """config: the text configuration of a transformers model."""
        self.num_last = int(HiddenStates.LAST in states)
        self.layers = layers_of(config.num_hidden_layers) if HiddenStates.LAYERS in states else ()
        self.num_states = self.num_last + len(self.layers)
        self._hidden_size: int = config.hidden_size

    def columns(self, wanted: HiddenStates) -> slice:
        """Return the columns of the wanted states; empty unless all of them are kept."""
        if (HiddenStates.LAST in wanted and not self.num_last) or (HiddenStates.LAYERS in wanted and not self.layers):
            return slice(0, 0)
        start = 0 if HiddenStates.LAST in wanted else self.num_last
        stop = self.num_states if HiddenStates.LAYERS in wanted else self.num_last
        return slice(start * self._hidden_size, stop * self._hidden_size)

    def column_of_layer(self, layer: int) -> int:
        """Return the first column of a decoder layer's input, −1 unless it is kept."""
        return (self.num_last + self.layers.index(layer)) * self._hidden_size if layer in self.layers else -1


class FeatureTap(FeatureColumns):
    """Collects, per pass, the kept hidden states of a transformers model."""

    def __init__(self, model: Any, states: HiddenStates) -> None:
        super().__init__(model.config.get_text_config(), states)
        decoder = model.get_decoder()
        self._states: dict[int, Tensor] = {}
        if self.num_last:
            # A hook on the decoder, not on its final norm, whose name differs from family to family.
            decoder.register_forward_hook(lambda module, args, output: self._states.update({0: output[0][0]}))
        for place, layer in enumerate(self.layers, start=1):
            decoder.layers[layer].register_forward_pre_hook(
                lambda module, args, place=place: self._states.update({place: args[0][0]})
            )

    def take(self) -> Tensor:
        """Return the states of the pass, (N, num_states · hidden_size), and forget them."""
        states = [self._states.pop(place) for place in sorted(self._states)]
        return torch.cat(states, dim=-1)
