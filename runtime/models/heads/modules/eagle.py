"""The heads of EAGLE-1/2 (arXiv:2401.15077, 2406.16858) and EAGLE-3 (arXiv:2503.01840), which predict features.

Row i reads the target's feature of position i and the embedding of token i + 1, and has position i. Its output
predicts the feature of position i + 1, and so gives the distribution of token i + 2. A drafted row reads the output of
the row before it in place of the target's feature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from orchestrator.core.static_trees import EAGLE_LEAVES, best_first, tree_of_choices, usual_accuracy
from orchestrator.core.tree import TokenTree
from runtime.models.fused import BorrowedLinear
from runtime.models.heads.modules.layers import Attend, Eagle3Layer, EagleLayer, norm_of
from runtime.models.heads.sharpness import Sharpness

#: Accuracy of the first level, and the factor for each level after it: a head that reads the drafted tokens stays about
#: as accurate from level to level (arXiv:2401.15077, n-α).
PRIOR_ACCURACY = (0.75, 0.95)


def published_choices() -> TokenTree:
    """Return the published static tree, best nodes first, for a head whose accuracy was not measured."""
    published = tree_of_choices(EAGLE_LEAVES)
    return best_first(published, usual_accuracy(max(published.depths), *PRIOR_ACCURACY))


class EagleHead(nn.Module):
    """EAGLE-1/2: fc(cat(embedding, feature)), one decoder layer, the target's own embedding and LM head.

    Its parameters are the published ones: fc, layers.0. embedding, lm_head: (V, d), the target's, frozen. reads_token:
    False hides the sampled token, for the ablation (docs/methods/eagle.md). default_choices: the static tree for a
    request that sets no shape. sharpness: how sure the head is of its guesses.
    """

    sharpness = Sharpness()

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
        """Numbers per row of features: one state, d."""
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


class Eagle3Norms(NamedTuple):
    """The norms that EAGLE-3.1 (arXiv:2605.09992) adds, named like the keys of config.json; EAGLE-3 has none of them.

    fc_norm: a norm for each of the three states before fc. norm_before_fc: one norm for the three together.
    norm_output: a drafted row reads the output after the norm. norm_before_residual: the layer's residual is normed.
    """

    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False


EAGLE3_NORMS = Eagle3Norms()


class Eagle3Head(nn.Module):
    """EAGLE-3: the states of three layers, fused by fc; one wider decoder layer; its own norm, LM head and vocabulary.

    Its parameters are the published ones: fc, midlayer, norm, lm_head, d2t (V_d,), whose entry i is the distance from
    draft id i to the target's id; EAGLE-3.1 adds fc_norm or input_norm. Invariant: a drafted row reads the layer's
    output before the norm; with norm_output, it and the LM head read the output after the norm.
    """

    sharpness = Sharpness()

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        draft_vocab_size: int,
        target_hidden_size: int = 0,
        norms: Eagle3Norms = EAGLE3_NORMS,
    ) -> None:
        """embedding: (V, d). target_hidden_size: the target's hidden size, if it differs from the head's d; else 0."""
        super().__init__()
        d = config.hidden_size
        width = target_hidden_size or d
        self.norms = norms
        self.config = config
        self.default_choices = published_choices()
        if norms.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(3))
        if norms.norm_before_fc:
            self.input_norm = nn.RMSNorm(3 * width, eps=config.rms_norm_eps)
        self.fc = nn.Linear(3 * width, d, bias=False)
        self.midlayer = Eagle3Layer(config, norms.norm_before_residual)
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(d, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
        self.register_buffer("embedding", embedding, persistent=False)

    @property
    def feature_width(self) -> int:
        """Numbers per row of features: three states of the target."""
        return self.fc.in_features

    @property
    def ids(self) -> Tensor:
        """The target's ids of the draft vocabulary, (V_d,) int64."""
        d2t = self.get_buffer("d2t")
        return torch.arange(len(d2t), device=d2t.device) + d2t

    def fuse(self, features: Tensor) -> Tensor:
        """features: (…, 3d), the target's → (…, d), which `forward` reads."""
        if self.norms.fc_norm:
            parts = features.unflatten(-1, (3, -1)).unbind(-2)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.norms.norm_before_fc:
            features = self.input_norm(features)
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, state: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """state: (B, n, d), fused features or outputs of earlier rows; tokens, positions: (B, n) → (B, n, d)."""
        embedded = functional.embedding(tokens, self.get_buffer("embedding"))
        output: Tensor = self.midlayer(embedded, state, positions, attend)
        return self.norm(output) if self.norms.norm_output else output

    def logits(self, state: Tensor) -> Tensor:
        """state: (…, d) → (…, V_d)."""
        logits: Tensor = self.lm_head(state if self.norms.norm_output else self.norm(state))
        return logits
