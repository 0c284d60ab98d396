"""transformers' own classes over a checkpoint: a folder, a hub id or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.core.deployment.gguf_checkpoint import checkpoint_folder
from orchestrator.core.deployment.gguf_file import is_gguf
from orchestrator.core.errors import ConfigError, first_line
from runtime.models.gguf import read_weights


def read_pretrained(kind: Any, source: str, **options: Any) -> Any:
    """Read a configuration, a tokenizer or a model with one of transformers' Auto classes; ConfigError if it fails."""
    try:
        if kind is AutoModelForCausalLM and is_gguf(source):
            return _read_gguf(source, **options)
        return kind.from_pretrained(checkpoint_folder(source), trust_remote_code=False, **options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{source}: not a readable checkpoint: {first_line(error)}") from error


def _read_gguf(source: str, **options: Any) -> Any:
    """Load the model of a GGUF file with the file's exact values, rounded to options["dtype"]."""
    config, weights = read_pretrained(AutoConfig, source), read_weights(source)
    kind = getattr(transformers, config.architectures[0])
    found = kind.from_pretrained(None, config=config, state_dict=weights.state_dict(options["dtype"]), **options)
    model = found[0] if options.get("output_loading_info") else found
    if weights.frequency_factors is not None:
        model.get_decoder().rotary_emb.inv_freq /= weights.frequency_factors
    return found


def resolve(folder: str) -> str:
    """Return `folder`, which must exist if it is a path; anything else is a hub id that transformers looks up."""
    if folder.startswith(("/", ".")) and not is_gguf(folder) and not Path(folder).is_dir():
        raise ConfigError(f"the checkpoint folder {folder} does not exist (a hub id is written owner/name)")
    return folder
