"""The gateway's settings: a flag overrides the environment variable GATEWAY_<NAME>, which overrides the default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from gateway.errors import did_you_mean

PREFIX = "GATEWAY_"
#: An empty variable counts as not set, except these, which say that keys are needed: a Secret may be empty by mistake.
KEYS = ("api_keys", "api_keys_file")
#: How long an idle connection stays open. If a client's own limit is the same (httpx, and with it openai: 5 s, which is
#: uvicorn's limit too), it occasionally sends a request on a connection that is just being closed.
KEEP_ALIVE_S = 75


class SettingsError(Exception):
    """A setting is wrong; the message names it, its value and where it is set."""


class Settings(BaseModel):
    """A field is a flag (`--max-body-bytes`) and a variable (`GATEWAY_MAX_BODY_BYTES`); its description is the help."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(9000, ge=0, le=65535, description="port to listen on; 0 = any free port")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of /metrics, which needs no key there (default: /metrics beside the API, with its keys)",
    )
    allowed_origins: str = Field(
        "",
        description="origins whose pages may send requests (CORS), separated by commas; * = all",
    )
    replicas: str = Field(
        "localhost:8001",
        min_length=1,
        description="gRPC addresses: host:port,host:port…, or dns://name:port for every address of a name",
    )
    tokenizer: str = Field("", description="folder or hub id of the target: its tokenizer.json and chat template")
    chat_template: str = Field("", description="file of a chat template that replaces the checkpoint's")
    tool_parser: str = Field(
        "auto",
        pattern="^(auto|hermes|llama3)$",
        description="how the chat template writes tool calls: hermes (<tool_call>, also Qwen), llama3, or auto",
    )
    model_name: str = Field("", description="name of the model in requests (default: the last part of --tokenizer)")
    max_model_len: int = Field(
        0, ge=0, description="longest context in tokens, where it is not the max_position_embeddings of config.json"
    )
    api_keys: str | None = Field(
        None,
        repr=False,
        description="accepted API keys, separated by commas; unless keys are set, no key is needed. Every user of the "
        "machine can read a flag (ps): better use --api-keys-file or GATEWAY_API_KEYS",
    )
    api_keys_file: str | None = Field(None, description="file of accepted API keys, one per line")
    salt_by_key: bool = Field(
        False, description="derive cache_salt from a request's API key, and ignore the client's own and its priority"
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="longest request body")
    receive_limit_s: float = Field(60, gt=0, description="longest that a client may take to send a request's body")
    send_limit_s: float = Field(60, gt=0, description="longest that a client may read nothing of a response")
    max_sequences: int = Field(32, ge=1, le=1024, description="most sequences of one request: prompts × n")
    request_timeout_s: float = Field(600, gt=0, le=86_400, description="deadline of a request")
    first_limit_s: float = Field(
        60, gt=0, description="longest wait for a replica's first response, its queue included, if there is another"
    )
    silence_limit_s: float = Field(
        15, gt=0, description="longest pause between two responses before another replica takes over"
    )
    ping_interval_s: float = Field(
        10, gt=0, description="a stream without an event for this long gets its headers and a comment"
    )
    recovery_limit_s: float = Field(30, gt=0, description="how long a request waits for a replica that can serve it")
    health_interval_s: float = Field(2, gt=0, description="pause between two health checks of a replica")
    resolve_interval_s: float = Field(5, gt=0, description="pause between two look-ups of dns://")
    affinity_slack: int = Field(
        4, ge=0, description="how many more requests a prompt's preferred replica may have than the least loaded one"
    )
    stop_limit_s: int = Field(30, ge=0, description="how long running requests get when the gateway is stopped")
    log_level: str = Field("info", pattern="^(error|warning|info|debug)$", description="error, warning, info or debug")

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        for origin in filter(None, map(str.strip, text.split(","))):
            if origin != "*" and not re.fullmatch(r"[\w+.-]+://[^\s/]+", origin):  # no page would have it
                raise PydanticCustomError("origin", "each must be * or scheme://host without a path")
        return text


def read_settings(arguments: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """Return the settings; raises SettingsError for the first variable that is unknown or value that is not allowed.

    arguments: the flags that are set, by field.
    """
    variables = {name.removeprefix(PREFIX).lower(): text for name, text in environ.items() if name.startswith(PREFIX)}
    values = {name: text for name, text in variables.items() if text or name in KEYS}
    try:
        return Settings(**{**values, **arguments})  # pydantic converts the texts
    except ValidationError as refused:
        first = refused.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        known = [PREFIX + field.upper() for field in Settings.model_fields]
        variable = PREFIX + name.upper()
        raise SettingsError(f"unknown environment variable {variable}{did_you_mean(variable, known)}")
    raise SettingsError(f"{name}: {first['msg']}, got {first['input']!r} ({places_of(name)})")


def places_of(name: str) -> str:
    """Return where a setting is set: its flag and its variable."""
    return f"--{name.replace('_', '-')} or {PREFIX}{name.upper()}"


def parse_flags(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add a flag for each setting and parse; return all options, and the settings among them that are set."""
    for name, field in Settings.model_fields.items():
        default = "" if field.default in ("", None) else f" ({field.default})"
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}  # --salt-by-key
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="…", help=f"{field.description}{default}", **bare)
    options = parser.parse_args(arguments)
    return options, {name: value for name in Settings.model_fields if (value := getattr(options, name)) is not None}
