"""What the orchestrator must know about the target's checkpoint: its tokenizer and a few numbers; opens no weights."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from orchestrator.core.declarations import ConfigKeys, as_object, read_json_file, validate_config
from orchestrator.core.deployment.gguf_checkpoint import checkpoint_folder
from orchestrator.core.errors import ConfigError, abbreviated


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is known about a checkpoint.

    max_positions: longest context in tokens. eos_ids: the ids that end a text.
    num_parameters: an estimate of those that a token passes through; 0 = unknown.
    tokenizer_file: path of its tokenizer.json.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]
    num_parameters: int = 0
    tokenizer_file: str = ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; other threads run meanwhile, because encode_batch releases the GIL."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens of the model by their names, which no text contains."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {entry.content: token for token, entry in added if entry.special and token < self.vocab_size}


class _Sizes(ConfigKeys):
    """Keys of config.json that every checkpoint must have."""

    vocab_size: int
    max_position_embeddings: int


def read_checkpoint(source: str) -> Checkpoint:
    """Read a checkpoint: a folder, hub id or GGUF file; ConfigError names the file that is missing or broken."""
    config = read_json(source, "config.json")
    if config is None:
        raise ConfigError(f"{source}: {missing_config(source)}")
    text_config = as_object(config.get("text_config", config), f"text_config in {source}/config.json")
    generation = read_json(source, "generation_config.json") or {}
    named = (each["eos_token_id"] for each in (config, text_config) if each.get("eos_token_id") is not None)
    eos = generation["eos_token_id"] if "eos_token_id" in generation else next(named, None)
    tokenizer_file = _find(source, "tokenizer.json")
    if tokenizer_file is None:
        raise ConfigError(f"{source}: tokenizer.json is missing (a fast tokenizer is needed)")
    if "model_type" in config and not _Sizes.model_fields.keys() <= text_config.keys():
        text_config = text_config | _resolved(source)
    sizes = validate_config(_Sizes, text_config, f"{source}/config.json")
    return Checkpoint(
        read_tokenizer(tokenizer_file),
        sizes.vocab_size,
        sizes.max_position_embeddings,
        _eos_ids(eos, source),
        estimated_parameters(text_config),
        str(tokenizer_file),
    )


def check_same_tokens(draft: str, target: str) -> None:
    """Raise ConfigError if two checkpoints have tokenizers in which an id or a token stands for different things.

    A draft model without a tokenizer is taken to have the target's.
    """
    files = [_find(source, "tokenizer.json") for source in (draft, target)]
    if None in files:
        return
    ours, theirs = (read_tokenizer(file).get_vocab() for file in files if file)
    names = {token: name for name, token in theirs.items()}
    for name, token in ours.items():
        if theirs.get(name, token) != token or names.get(token, name) != name:
            raise ConfigError(
                f"the draft model {draft} has another tokenizer than the target {target}: the id {token} is {name!r} "
                f"there, {names.get(token)!r} here (key draft; a draft model needs the target's tokenizer)"
            )


def missing_config(source: str) -> str:
    """Return why a checkpoint without config.json cannot be served."""
    adapter = read_json(source, "adapter_config.json")
    if adapter is None:
        return "config.json is missing"
    return (
        f"a PEFT adapter of {abbreviated(adapter.get('base_model_name_or_path'))}, not a model; merge it into its "
        "model (merge_and_unload, then save_pretrained with the tokenizer) and serve the merged folder"
    )


def _resolved(source: str) -> dict[str, Any]:
    """Return the numbers that a configuration implies; raises ConfigError if transformers cannot read it."""
    command = [sys.executable, "-m", "runtime.models.resolved_config", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(done.stderr.strip().rpartition("\n")[2] or f"{source}/config.json cannot be read")
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def _eos_ids(eos: Any, source: str) -> frozenset[int]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if wrong := [token for token in ids if type(token) is not int or token < 0]:
        raise ConfigError(f"{source}: eos_token_id must be an id or a list of ids, got {abbreviated(wrong[0])}")
    return frozenset(ids)


def estimated_parameters(config: dict[str, Any]) -> int:
    """Estimate from config.json how many parameters a token passes through; of experts, only the active ones count.

    Every MLP is assumed to be gated (three matrices). Returns 0 if the config does not say.
    """
    hidden = _size(config, "hidden_size", "n_embd")
    heads = _size(config, "num_attention_heads", "n_head", default=1)
    head_width = _size(config, "head_dim", default=hidden // heads)
    kv_heads = _size(config, "num_key_value_heads", default=heads)
    attention = 2 * hidden * head_width * (heads + kv_heads)
    dense = _size(config, "intermediate_size", "n_inner", default=4 * hidden)
    num_experts = _size(config, "num_experts_per_tok", default=1)
    routed = num_experts * _size(config, "moe_intermediate_size", default=dense)
    mlp = 3 * hidden * (routed + _size(config, "shared_expert_intermediate_size"))
    embeddings = hidden * _size(config, "vocab_size") * (1 if config.get("tie_word_embeddings") else 2)
    num_layers = _size(config, "num_hidden_layers", "n_layer")
    return num_layers * (attention + mlp) + embeddings


def _size(config: dict[str, Any], *names: str, default: int = 0) -> int:
    """Return the value of the first of these keys that has a positive integer, else the default."""
    values = [config[name] for name in names if name in config]
    return next((value for value in values if type(value) is int and value > 0), default)


def _find(source: str, name: str) -> Path | None:
    source = checkpoint_folder(source)
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source, name))
    except LocalEntryNotFoundError as error:  # the hub cannot be reached, so the file may exist
        raise ConfigError(f"{source}: not in the local cache, and the hub cannot be reached: {error}") from None
    except EntryNotFoundError:
        return None
    except Exception as error:  # the hub client raises many types; each means that the file cannot be fetched
        raise ConfigError(f"{source}: neither a folder nor a hub id that can be fetched: {error}") from None


def read_json(source: str, name: str) -> dict[str, Any] | None:
    """Return a JSON file of a checkpoint (folder or hub id), None if it lacks the file; ConfigError if it is broken."""
    file = _find(source, name)
    return read_json_file(file) if file else None


def read_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; raises ConfigError.

    A training script may have left its truncation and padding in the file; a text is always encoded as a whole.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"{file} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
