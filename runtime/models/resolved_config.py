"""`python -m runtime.models.resolved_config CHECKPOINT`: the numbers of its configuration, those that it implies too.

config.json may leave out what its class has as a default, or name it differently (n_positions); only transformers
knows. The orchestrator, which does not import transformers, runs this in a process of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import AutoConfig

from orchestrator.core.errors import ConfigError
from runtime.models.stock import read_pretrained

NAMES = (
    "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "tie_word_embeddings", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "eos_token_id",
)  # fmt: skip


def resolved(source: str) -> dict[str, Any]:
    """Return the numbers of a checkpoint's text model that its configuration has; raises ConfigError."""
    config = read_pretrained(AutoConfig, source).get_text_config()
    found = {name: getattr(config, name, None) for name in NAMES}
    return {name: value for name, value in found.items() if value is not None}


if __name__ == "__main__":
    try:
        print(json.dumps(resolved(*sys.argv[1:2])))
    except ConfigError as error:
        sys.exit(str(error))
