"""Hidden states for drafting heads, tapped during the forward pass (docs/protocol.md, Which hidden state)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestrator.core.errors import ConfigError
from orchestrator.core.types import HiddenStates

# Fewer have no three layers that differ.
MIN_LAYERS = 7


def layers_of(depth: int) -> tuple[int, int, int]:
    """Return the decoder layers whose inputs EAGLE-3 reads (arXiv:2503.01840, section 3.1), of `depth` in all."""
    if depth < MIN_LAYERS:
        raise ConfigError(
            f"EAGLE-3 reads the inputs of layers 2, L/2 and L-3; the target has {depth} layers, "
            f"at least {MIN_LAYERS} are needed"
        )
    return 2, depth // 2, depth - 3


class FeatureTap:
    """Collects, per pass, the states that the deployment's heads read: LAST, then LAYERS."""

    def __init__(self, model: Any, states: HiddenStates) -> None:
        decoder = model.get_decoder()
        self._states: dict[int, Tensor] = {}
        self._has_last = HiddenStates.LAST in states
        self._hidden_size: int = model.config.get_text_config().hidden_size
        layers = layers_of(len(decoder.layers)) if HiddenStates.LAYERS in states else ()
        self.num_states = int(self._has_last) + len(layers)
        if self._has_last:
            decoder.register_forward_hook(self._after_norm)
        for place, layer in enumerate(layers, start=1):
            decoder.layers[layer].register_forward_pre_hook(self._before(place))

    def take(self) -> Tensor:
        """Return the states of the pass, (N, num_states · hidden_size), and forget them."""
        states = [self._states.pop(place) for place in sorted(self._states)]
        return torch.cat(states, dim=-1)

    def columns(self, wanted: HiddenStates) -> slice:
        """Return where the wanted states stand among those that are kept; none where not all of them are."""
        last, layers = int(self._has_last), self.num_states - int(self._has_last)
        if (HiddenStates.LAST in wanted and not last) or (HiddenStates.LAYERS in wanted and not layers):
            return slice(0, 0)
        start, stop = (
            0 if HiddenStates.LAST in wanted else last,
            last + (layers if HiddenStates.LAYERS in wanted else 0),
        )
        return slice(start * self._hidden_size, stop * self._hidden_size)

    def _after_norm(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # The decoder's own output: its final norm has another name in every other family.
        self._states[0] = output[0][0]

    def _before(self, place: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            self._states[place] = args[0][0]

        return hook
