"""The heads of EAGLE-1/2 (arXiv:2401.15077, 2406.16858) and EAGLE-3 (arXiv:2503.01840): features drawn forward.

Entry i pairs the target's feature of position i with the embedding of token i + 1 and stands at position i; its
output stands for the feature of position i + 1, from which comes the distribution of token i + 2.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from orchestrator.core.static_trees import EAGLE_LEAVES, best_first, tree_of_choices, usual_accuracy
from orchestrator.core.tree import TokenTree
from runtime.heads.modules.layers import Attend, Eagle3Layer, EagleLayer, norm_of
from runtime.model.fused import BorrowedLinear


class Extrapolator(Protocol):
    """What the EAGLE engine runs.

    config: sizes of its layer. own_choices: the static tree of a request that names none.
    """

    config: LlamaConfig
    own_choices: TokenTree

    @property
    def feature_width(self) -> int:
        """Numbers of the target's in a row of features."""

    @property
    def ids(self) -> Tensor | None:
        """Target ids of the logits' columns, (V_d,); None = the vocabulary is the target's."""

    def get_buffer(self, target: str) -> Tensor:
        """Return a buffer: `embedding` is (V, d), the target's."""

    def fuse(self, features: Tensor) -> Tensor:
        """features: (…, width) of the target → (…, d), what `forward` reads."""

    def forward(self, state: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """state: (B, n, d), fused or of an entry before; tokens, positions: (B, n) → the next state, (B, n, d)."""

    def logits(self, state: Tensor) -> Tensor:
        """state: (…, d) → (…, V_d)."""


#: A head that reads the drafted tokens stays about as good with each level (arXiv:2401.15077, n-α).
USUAL = (0.75, 0.95)


def own_choices() -> TokenTree:
    """Return the published static tree of a head whose accuracy is not known."""
    published = tree_of_choices(EAGLE_LEAVES)
    return best_first(published, usual_accuracy(max(published.depths), *USUAL))


class EagleHead(nn.Module):
    """EAGLE-1/2: fc(cat(embedding, feature)), one decoder layer, the target's own embedding and LM head.

    Its parameters are the published ones: fc, layers.0. embedding, lm_head: (V, d), the target's, frozen. reads_token:
    False leaves the sampled token out, for the ablation (docs/methods/eagle.md).
    """

    def __init__(self, config: LlamaConfig, embedding: Tensor, lm_head: Tensor, reads_token: bool = True) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.own_choices = own_choices()
        self.reads_token = reads_token
        self.fc = nn.Linear(2 * d, d, bias=getattr(config, "bias", True))
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.register_buffer("embedding", embedding, persistent=False)
        self.output = BorrowedLinear(lm_head)

    @property
    def feature_width(self) -> int:
        """One state, d numbers."""
        return int(self.config.hidden_size)

    @property
    def ids(self) -> None:
        """Its vocabulary is the target's."""

    def fuse(self, features: Tensor) -> Tensor:
        """Return the features as they are: the state after the final norm, (…, d)."""
        return features

    def forward(self, state: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """state: (B, n, d); tokens, positions: (B, n) → the feature one place on, (B, n, d)."""
        embedded = functional.embedding(tokens, self.get_buffer("embedding"))
        if not self.reads_token:
            embedded = torch.zeros_like(embedded)
        output: Tensor = self.layers[0](self.fc(torch.cat([embedded, state], dim=-1)), positions, attend)
        return output

    def logits(self, state: Tensor) -> Tensor:
        """state: (…, d) → (…, V), by the target's LM head."""
        logits: Tensor = self.output(state)
        return logits


class Eagle3Head(nn.Module):
    """EAGLE-3: three layers' states fused by fc, one wider decoder layer, its own norm, LM head and vocabulary.

    Its parameters are the published ones: fc, midlayer, norm, lm_head, d2t (V_d,), whose entry i is the distance from
    draft id i to the target's id. Invariant: a drafted entry reads the layer's own output, not normed.
    """

    def __init__(
        self, config: LlamaConfig, embedding: Tensor, draft_vocab_size: int, target_hidden_size: int = 0
    ) -> None:
        """embedding: (V, d). target_hidden_size: 0 = the head's own, d."""
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.own_choices = own_choices()
        self.fc = nn.Linear(3 * (target_hidden_size or d), d, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(d, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
        self.register_buffer("embedding", embedding, persistent=False)

    @property
    def feature_width(self) -> int:
        """Three states of the target."""
        return self.fc.in_features

    @property
    def ids(self) -> Tensor:
        """Target ids of the draft vocabulary, (V_d,) int64."""
        d2t = self.get_buffer("d2t")
        return torch.arange(len(d2t), device=d2t.device) + d2t

    def fuse(self, features: Tensor) -> Tensor:
        """features: (…, 3d) → (…, d)."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, state: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """state: (B, n, d); tokens, positions: (B, n) → the layer's output, (B, n, d)."""
        embedded = functional.embedding(tokens, self.get_buffer("embedding"))
        output: Tensor = self.midlayer(embedded, state, positions, attend)
        return output

    def logits(self, state: Tensor) -> Tensor:
        """state: (…, d) → (…, V_d)."""
        logits: Tensor = self.lm_head(self.norm(state))
        return logits
