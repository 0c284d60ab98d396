"""The checkpoint's tokenizer and chat template, for token lists, log-probabilities and chats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from gateway.errors import BadRequest, ContextTooLong
from gateway.settings import SettingsError

#: A tokenizer that normalizes may make a text this many times shorter in bytes (Unicode's NFKC, for one character).
_MAX_SHORTENING = 4
#: The number of tokens whose bytes are cached.
_MAX_CACHED = 1 << 15
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint's tokenizer and chat template.

    template: source of the chat template; "" = no template. special_tokens: {name in templates: token}.
    max_positions: longest context in tokens; None = unknown.
    """

    name: str
    tokenizer: Tokenizer
    template: str
    special_tokens: Mapping[str, str]
    max_positions: int | None = None

    def __post_init__(self) -> None:
        try:
            self._compiled  # noqa: B018  # a broken template is an error at startup, not of each request
        except jinja2.TemplateError as error:
            raise SettingsError(f"the chat template of {self.name}: {error} (--chat-template)") from None

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

    def _bytes_of(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token) or ""
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if self._is_byte_level and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
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
        return '"ByteLevel"' in json.dumps(json.loads(self.tokenizer.to_str()).get("decoder"))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.template)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self.tokenizer.get_vocab_size())

    def render_chat(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Return the prompt of a chat; raises BadRequest if there is no template, or it refuses the messages."""
        if not self.template:
            raise BadRequest(
                f"{self.name!r} has no chat template: use /v1/completions, or give the gateway one (--chat-template)",
                "messages",
            )
        values = {"messages": messages, "add_generation_prompt": True, **self.special_tokens, **arguments}
        try:
            return self._compiled.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}", "messages") from None


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


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
        template = _template(source, template_file, config)
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise SettingsError(f"{source}: {error} (--tokenizer, --chat-template)") from None
    special = {
        key: _content(config[key]) for key in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(key)
    }
    name = name or source.rstrip("/").rpartition("/")[2]
    return Checkpoint(name, tokenizer, template, special, max_positions or None)


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
    return int(config.get("text_config", config).get("max_position_embeddings") or 0)


def _template(source: str, template_file: str, config: Mapping[str, Any]) -> str:
    if template_file:
        return Path(template_file).read_text(encoding="utf-8")
    if file := find_file(source, "chat_template.jinja"):
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template") or ""
    if isinstance(found, list):  # several templates, each with a name
        found = next((entry["template"] for entry in found if entry["name"] == "default"), "")
    return str(found)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level BPE (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
