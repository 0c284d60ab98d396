"""Hidden states for drafting heads, tapped during the forward pass (docs/protocol.md, Which hidden state)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KINDS = ("none", "last", "eagle3")


class FeatureTap:
    """Collects, per pass, the states that the deployment's heads read.

    kind: none; last, the output of the final norm (Medusa, EAGLE-1/2, ReDrafter);
    eagle3, the inputs of decoder layers 2, L // 2 and L − 3, side by side.
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._states: dict[int, Tensor] = {}
        self.num_states = {"none": 0, "last": 1, "eagle3": 3}[kind]
        decoder = model.get_decoder()
        if kind == "last":
            decoder.register_forward_hook(self._after_norm)
        if kind == "eagle3":
            depth = len(decoder.layers)
            for place, layer in enumerate((2, depth // 2, depth - 3)):
                decoder.layers[layer].register_forward_pre_hook(self._before(place))

    def take(self) -> Tensor:
        """Return the states of the pass, (N, num_states · hidden_size), and forget them."""
        states = [self._states.pop(place) for place in range(self.num_states)]
        return torch.cat(states, dim=-1)

    def _after_norm(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # The decoder's own output: its final norm has another name in every other family.
        self._states[0] = output[0][0]

    def _before(self, place: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            self._states[place] = args[0][0]

        return hook
