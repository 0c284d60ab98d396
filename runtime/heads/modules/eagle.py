"""The heads of EAGLE-1/2 (arXiv:2401.15077, 2406.16858) and EAGLE-3 (arXiv:2503.01840): the next feature is predicted.

Row i reads the target's feature of position i and the embedding of token i + 1, and stands at position i. Its output
stands for the feature of position i + 1 and gives the distribution of token i + 2. A drafted row reads the output of
the row before it in place of the target's feature.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from orchestrator.core.static_trees import EAGLE_LEAVES, best_first, tree_of_choices, usual_accuracy
from orchestrator.core.tree import TokenTree
from runtime.heads.modules.layers import Attend, Eagle3Layer, EagleLayer, norm_of
from runtime.model.fused import BorrowedLinear

#: Accuracy of the first level, and the factor for each further level: a head that reads the drafted tokens stays about
#: as accurate with each level (arXiv:2401.15077, n-α).
PRIOR_ACCURACY = (0.75, 0.95)


def published_choices() -> TokenTree:
    """Return the published static tree, its nodes the best first, for a head whose accuracy was not measured."""
    published = tree_of_choices(EAGLE_LEAVES)
    return best_first(published, usual_accuracy(max(published.depths), *PRIOR_ACCURACY))


class EagleHead(nn.Module):
    """EAGLE-1/2: fc(cat(embedding, feature)), one decoder layer, the target's own embedding and LM head.

    Its parameters are the published ones: fc, layers.0. embedding, lm_head: (V, d), the target's, frozen. reads_token:
    False hides the sampled token, for the ablation (docs/methods/eagle.md). default_choices: the static tree for a
    request that names no shape.
    """

    def __init__(self, config: LlamaConfig, embedding: Tensor, lm_head: Tensor, reads_token: bool = True) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.default_choices = published_choices()
        self.reads_token = reads_token
        self.fc = nn.Linear(2 * d, d, bias=getattr(config, "bias", True))
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.register_buffer("embedding", embedding, persistent=False)
        self.output = BorrowedLinear(lm_head)

    @property
    def feature_width(self) -> int:
        """Numbers in a row of features: one state, d."""
        return int(self.config.hidden_size)

    @property
    def ids(self) -> None:
        """None: the head's vocabulary is the target's."""

    def fuse(self, features: Tensor) -> Tensor:
        """Return the features unchanged: the target's states after its final norm, (…, d)."""
        return features

    def forward(self, state: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """state: (B, n, d), features or outputs of earlier rows; tokens, positions: (B, n) → features, (B, n, d)."""
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
    """EAGLE-3: the states of three layers, fused by fc; one wider decoder layer; its own norm, LM head and vocabulary.

    Its parameters are the published ones: fc, midlayer, norm, lm_head, d2t (V_d,), whose entry i is the distance from
    draft id i to the target's id. Invariant: a drafted row reads the layer's own output, before the norm.
    """

    def __init__(
        self, config: LlamaConfig, embedding: Tensor, draft_vocab_size: int, target_hidden_size: int = 0
    ) -> None:
        """embedding: (V, d). target_hidden_size: the target's, if it differs from the head's own d; else 0."""
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.default_choices = published_choices()
        self.fc = nn.Linear(3 * (target_hidden_size or d), d, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(d, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
        self.register_buffer("embedding", embedding, persistent=False)

    @property
    def feature_width(self) -> int:
        """Numbers in a row of features: three states of the target."""
        return self.fc.in_features

    @property
    def ids(self) -> Tensor:
        """The target's ids of the draft vocabulary, (V_d,) int64."""
        d2t = self.get_buffer("d2t")
        return torch.arange(len(d2t), device=d2t.device) + d2t

    def fuse(self, features: Tensor) -> Tensor:
        """features: (…, 3d), of the target → (…, d), what `forward` reads."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, state: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """state: (B, n, d), fused features or outputs of earlier rows; tokens, positions: (B, n) → (B, n, d)."""
        embedded = functional.embedding(tokens, self.get_buffer("embedding"))
        output: Tensor = self.midlayer(embedded, state, positions, attend)
        return output

    def logits(self, state: Tensor) -> Tensor:
        """state: (…, d) → (…, V_d)."""
        logits: Tensor = self.lm_head(self.norm(state))
        return logits
