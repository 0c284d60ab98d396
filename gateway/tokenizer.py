"""The checkpoint's tokenizer, for token lists and log-probabilities, and where its chat templates are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from gateway.chat_template import DEFAULT, TOOL_USE, ChatTemplates
from gateway.errors import ContextTooLong
from gateway.settings import SettingsError

#: A tokenizer that normalizes may make a text this many times shorter in bytes (Unicode's NFKC, for one character).
_MAX_SHORTENING = 4
#: The number of tokens whose bytes are cached.
_MAX_CACHED = 1 << 15
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: The special tokens that transformers gives to templates.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint's tokenizer and chat templates. max_positions: longest context in tokens; None = unknown."""

    name: str
    tokenizer: Tokenizer
    templates: ChatTemplates
    max_positions: int | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; other threads run meanwhile, because encode_batch releases the GIL."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def check_length(self, text: str, param: str) -> None:
        """Raise ContextTooLong for a text too long for any tokens that fit the context; the text is not encoded."""
        if self.max_positions is None:
            return
        most_bytes = self.max_positions * self._longest_token * _MAX_SHORTENING
        if (num_bytes := len(text.encode())) > most_bytes:
            raise ContextTooLong(
                f"{param} has {num_bytes} bytes, which no {self.max_positions} tokens can hold (context of the model)",
                param,
            )

    def check_num_ids(self, num_ids: int, param: str, room: int = 1) -> None:
        """Raise ContextTooLong for ids that leave no room for `room` more tokens in the model's context."""
        if self.max_positions is not None and num_ids > (most := self.max_positions - room):
            raise ContextTooLong(f"{param} has {num_ids} tokens, at most {most} allowed (context of the model)", param)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for, which may be only part of a character."""
        return self._cached_bytes(token)

    @cached_property
    def _cached_bytes(self) -> Callable[[int], bytes]:
        # Log-probabilities show the same tokens again and again, 20 at each position.
        return lru_cache(_MAX_CACHED)(self._bytes_of)

    def token_name(self, token: int) -> str:
        """Return a token as text; `bytes:…` for one that stands for no whole characters, `token_id:…` for no text."""
        raw, piece = self.token_bytes(token), self.tokenizer.id_to_token(token)
        if piece is None:
            return f"token_id:{token}"
        try:
            if not _BYTE_TOKEN.fullmatch(piece):
                return raw.decode()
        except UnicodeDecodeError:
            pass
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        """Return names of tokens that all differ: of several with one text, all but the first are `token_id:…`."""
        names = dict[str, int]()
        for token in tokens:
            name = self.token_name(token)
            names[f"token_id:{token}" if name in names else name] = token
        return list(names)

    def _bytes_of(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token) or ""
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        table = _byte_characters()
        if self._is_byte_level and all(character in table for character in piece):
            return bytes(table[character] for character in piece)
        return piece.replace("▁", " ").encode()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that have no text in a response."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @cached_property
    def _longest_token(self) -> int:
        """The most bytes that a token stands for."""
        return max((len(self._bytes_of(token)) for token in range(self.vocab_size)), default=1)

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(self.tokenizer.decoder)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self.tokenizer.get_vocab_size())


def read_checkpoint(source: str, template_file: str = "", name: str = "", max_positions: int = 0) -> Checkpoint:
    """Read tokenizer.json and the chat template of a folder or hub id; raises SettingsError if one cannot be read.

    max_positions: longest context in tokens; 0 = as config.json says, if there is one.
    """
    if not source:
        raise SettingsError(
            "tokenizer is missing: the folder or hub id of the target (--tokenizer or GATEWAY_TOKENIZER)"
        )
    file = find_file(source, "tokenizer.json")
    if file is None:
        raise SettingsError(f"{source} has no tokenizer.json (--tokenizer or GATEWAY_TOKENIZER)")
    config_file = find_file(source, "tokenizer_config.json")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file else {}
        max_positions = max_positions or _max_positions(source)
        sources = _templates(source, template_file, config)
        special = _special_tokens(source, config)
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise SettingsError(f"{source}: {error} (--tokenizer, --chat-template)") from None
    tokenizer.no_truncation()  # the file may have the settings of a training script, which transformers resets too
    tokenizer.no_padding()
    name = name or source.rstrip("/").rpartition("/")[2]
    return Checkpoint(name, tokenizer, ChatTemplates(name, sources, special), max_positions or None)


def find_file(source: str, name: str) -> Path | None:
    """Return a checkpoint's file, from the hub if the checkpoint is not a folder; None if it has no such file."""
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source, name))
    except LocalEntryNotFoundError as error:
        raise SettingsError(f"{source}: not in the local cache, and the hub cannot be reached: {error}") from None
    except EntryNotFoundError:
        return None
    except Exception as error:  # the hub client raises many types; each means that the file cannot be fetched
        raise SettingsError(f"{source}: neither a folder nor a hub id that can be fetched: {error}") from None


def _max_positions(source: str) -> int:
    """Return the longest context according to config.json, in tokens; 0 if it does not say."""
    file = find_file(source, "config.json")
    config = json.loads(file.read_text(encoding="utf-8")) if file else {}
    text = config.get("text_config", config)
    return int(text.get("max_position_embeddings") or text.get("n_positions") or 0)


def _templates(source: str, template_file: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: those in files of their own, else those of tokenizer_config.json."""
    if template_file:
        return {DEFAULT: Path(template_file).read_text(encoding="utf-8")}
    files = {
        DEFAULT: find_file(source, "chat_template.jinja"),
        TOOL_USE: find_file(source, f"additional_chat_templates/{TOOL_USE}.jinja"),
    }
    if found := {name: file.read_text(encoding="utf-8") for name, file in files.items() if file}:
        return found
    declared = config.get("chat_template") or {}
    if isinstance(declared, list):
        return {entry["name"]: entry["template"] for entry in declared}
    return {DEFAULT: declared} if isinstance(declared, str) else dict(declared)


def _special_tokens(source: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return {name in templates: token}; older checkpoints have a file of its own for them."""
    file = None if "added_tokens_decoder" in config else find_file(source, "special_tokens_map.json")
    declared = {**config, **(json.loads(file.read_text(encoding="utf-8")) if file else {})}
    return {name: _content(declared[name]) for name in _SPECIAL_TOKENS if declared.get(name) is not None}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


@cache
def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE stands for, as the library maps them."""
    # Every byte that UTF-8 has is in one of these characters; those that it lacks stand for themselves.
    text = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    known = dict(zip("".join(piece for piece, _ in pieces), text.encode(), strict=True))
    return {character: known.get(character, ord(character)) for character in pre_tokenizers.ByteLevel.alphabet()}
