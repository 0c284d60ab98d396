"""A GGUF file as a checkpoint folder: config.json, tokenizer.json and the others, written once into the user's cache.

So whoever reads a checkpoint's small files, ours or transformers, reads a GGUF file's as it reads any folder's.
`python -m orchestrator.core.deployment.gguf_checkpoint FILE` prints the folder, for a gateway on another machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.core.deployment.gguf_file import GgufFile, is_gguf, read_gguf
from orchestrator.core.deployment.gguf_tokenizer import begins, gguf_tokenizer
from orchestrator.core.errors import ConfigError

#: general.architecture → the class in transformers; all three are Llama with biases or norms of their own.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
#: Part of a folder's name: files that an older form of this module wrote are not read.
_FORM = "1"
_SCALINGS = ("none", "linear")


def checkpoint_folder(source: str) -> str:
    """Return the folder of a GGUF file's small files; any other checkpoint is returned as it is.

    Raises ConfigError for a file that cannot be read or whose model is not supported.
    """
    if not is_gguf(source) or Path(source).is_dir():
        return source
    path = Path(os.path.abspath(source))
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"{source}: the GGUF file cannot be read: {error.strerror}") from None
    key = f"{_FORM} {path} {state.st_size} {state.st_mtime_ns}"
    # The last part is the name under which a gateway serves the model.
    folder = _cache() / hashlib.sha256(key.encode()).hexdigest()[:16] / path.stem
    if not folder.is_dir():
        _write(read_gguf(path), folder)
    return str(folder)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "specserve" / "gguf"


def _write(file: GgufFile, folder: Path) -> None:
    """Write the small files to a folder, which appears complete; another process may do the same meanwhile."""
    config, tokenizer = config_of(file), gguf_tokenizer(file)
    documents = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": sorted(_ends(file))},
        "tokenizer_config.json": _tokenizer_config(file),
    }
    try:
        cache = folder.parent.parent
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".", dir=cache))
        made = partial / folder.name
        made.mkdir()
        for name, document in documents.items():
            (made / name).write_text(json.dumps(document, indent=2), encoding="utf-8")
        tokenizer.save(str(made / "tokenizer.json"))
        try:
            partial.rename(folder.parent)
        except OSError:
            shutil.rmtree(partial)
            if not folder.is_dir():
                raise
    except OSError as error:
        raise ConfigError(
            f"{file.path}: its tokenizer cannot be written to {folder.parent.parent}: {error.strerror}; set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from None


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json as transformers writes it; raises ConfigError for what the model has beyond Llama."""
    name = file.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: the architecture {name!r} is not read from GGUF (allowed: {', '.join(ARCHITECTURES)}); "
            "serve the original checkpoint folder"
        )
    if wrong := next(_unsupported(file, name), ""):
        raise ConfigError(f"{file.path}: {wrong} is not read from GGUF; serve the original checkpoint folder")
    heads, hidden = file.get(f"{name}.attention.head_count", int), file.get(f"{name}.embedding_length", int)
    theta = file.get(f"{name}.rope.freq_base", float, 10_000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if file.get(f"{name}.rope.scaling.type", str, "none") == "linear":
        rope |= {"rope_type": "linear", "factor": file.get(f"{name}.rope.scaling.factor", float)}
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": file.get(f"{name}.feed_forward_length", int),
        "num_hidden_layers": file.get(f"{name}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{name}.attention.head_count_kv", int, heads),
        "head_dim": _head_dim(file, name),
        "hidden_act": "silu",
        "max_position_embeddings": file.get(f"{name}.context_length", int),
        # The file has the float32 next to the decimal number that the model was made with.
        "rms_norm_eps": float(f"{file.get(f'{name}.attention.layer_norm_rms_epsilon', float):.7g}"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }


def _unsupported(file: GgufFile, name: str) -> Iterator[str]:
    """Yield what a model has that its class in transformers, as config_of describes it, lacks."""
    if file.get(f"{name}.expert_count", int, 0):
        yield "a mixture of experts"
    if (scaling := file.get(f"{name}.rope.scaling.type", str, "none")) not in _SCALINGS:
        yield f"the rope scaling {scaling!r}"
    if isinstance(file.metadata.get(f"{name}.attention.head_count_kv"), list):
        yield "a number of KV heads for each layer"
    if file.metadata.get(f"{name}.attention.sliding_window"):
        yield "a sliding window"
    width = _head_dim(file, name)
    sizes = {file.get(f"{name}.{key}", int, width) for key in ("rope.dimension_count", "attention.value_length")}
    if sizes != {width}:
        yield f"a head of {width} numbers of which others are rotated or summed ({', '.join(map(str, sorted(sizes)))})"


def _head_dim(file: GgufFile, name: str) -> int:
    heads, hidden = file.get(f"{name}.attention.head_count", int), file.get(f"{name}.embedding_length", int)
    return int(file.get(f"{name}.attention.key_length", int, hidden // max(heads, 1)))


def _vocab_size(file: GgufFile) -> int:
    """Return the rows of the embedding, which may be padded beyond the tokenizer."""
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path}: the file lacks the tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _ends(file: GgufFile) -> set[int]:
    """Return the ids that end a text: the end of the text, of a turn, of a message."""
    found = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return {token for token in found if type(token) is int}


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    tokens = file.get("tokenizer.ggml.tokens", list)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    special = {name: tokens[at] for name, at in ids.items() if type(at) is int and 0 <= at < len(tokens)}
    template = file.metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": begins(file),
        "clean_up_tokenization_spaces": False,
        **special,
        **({"chat_template": template} if isinstance(template, str) else {}),
    }


if __name__ == "__main__":
    try:
        print(checkpoint_folder(*sys.argv[1:2]))
    except ConfigError as wrong:
        sys.exit(f"error: {wrong}")
