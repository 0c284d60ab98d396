"""The pure parsers: each reads any bytes, and raises nothing but the error that its callers expect."""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from gateway.errors import ApiError
from gateway.fields import ChatFields, CompletionFields
from gateway.parsing import parse
from gateway.settings import SettingsError, read_settings
from gateway.triton import to_request
from launcher.settings import LauncherSettings
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import load_config
from orchestrator.core.deployment.engine_manifest import LLM_NAME, NAME, read_llm_manifest, read_manifest
from orchestrator.core.errors import ServingError
from orchestrator.core.grammar import Grammars
from orchestrator.core.messages.checks import (
    check_acceptance,
    check_draft,
    check_response,
    check_steps,
    checked_target_call,
)
from orchestrator.core.messages.codec import decode_answer, decode_call, encode_answer, encode_call
from orchestrator.core.messages.context import Delta, Release
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, DraftResponse, StepOptions
from orchestrator.drafting.tables import FILE, load_tables
from orchestrator.server.inputs import read
from orchestrator.server.request_builder import RequestBuilder
from runtime.models.heads.checkpoint import load
from runtime.models.heads.checkpoint.target_tables import TargetTables

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "models/target"
VOCAB_SIZE, MAX_NODES, HIDDEN_SIZE = 64, 16, 4


class Parser(NamedTuple):
    """read: the parser. seeds: what it reads without an error, or nearly. errors: what it may raise."""

    read: Callable[[bytes], Any]
    seeds: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = (ServingError,)

    def check(self, data: bytes) -> None:
        """Read these bytes; an error beside the expected ones is the parser's bug, and is raised."""
        try:
            self.read(data)
        except self.errors as error:
            assert str(error), "an error must say what is wrong"


@cache
def _folder() -> Path:
    """A folder for parsers that read files."""
    folder = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _file(name: str, data: bytes) -> Path:
    (_folder() / name).write_bytes(data)
    return _folder() / name


def _wire(data: bytes) -> None:
    """The first byte chooses the reader."""
    message, readers = np.frombuffer(data[1:], np.uint8), (_read_call, _read_acceptance, _read_steps, _read_drafts)
    readers[data[0] % len(readers) if data else 0](message)


def _read_call(message: Any) -> None:
    call = decode_call(message, "")
    if isinstance(call, DraftRequest):
        check_draft(call)
    else:
        checked_target_call(call, VOCAB_SIZE, MAX_NODES)


def _read_acceptance(message: Any) -> None:
    check_acceptance(decode_answer(message, Acceptance), TokenTree.from_paths([[4, 5], [6]]))


def _read_steps(message: Any) -> None:
    check_steps(decode_answer(message, list[Step]))


def _read_drafts(message: Any) -> None:
    check_response(decode_answer(message, DraftResponse), VOCAB_SIZE, MAX_NODES)


def _wire_seeds() -> tuple[bytes, ...]:
    delta, tree = Delta(9, 0, np.array([1, 2, 3], np.int32), 0, 2, "salt"), TokenTree.from_paths([[4, 5], [6]])
    calls = [
        StepRequest(delta, tree, Sampling(), StepOptions(), 1000),
        DraftRequest(delta, Sampling(0.5), 4, 4),
        Release(9),
    ]
    acceptance = Acceptance((1,), 3)
    answers = (acceptance, [Step(Proposal.of(tree, "auto"), acceptance, 0.0, 0.0)], DraftResponse(tree))
    return (
        *(b"\0" + encode_call(call, "").tobytes() for call in calls),
        *(bytes([reader]) + encode_answer(answer).tobytes() for reader, answer in enumerate(answers, start=1)),
    )


def _deployment(data: bytes) -> None:
    load_config(_file("serving.toml", data), {})


def _environment(data: bytes) -> None:
    """Lines of NAME=value for the launcher and for the gateway."""
    lines = data.decode(errors="replace").replace("\0", "").split("\n")
    environ = {name: value for name, _, value in (line.partition("=") for line in lines) if name}
    for reader in (LauncherSettings.from_environment, lambda found: read_settings({}, found)):
        try:
            reader(environ)
        except (ServingError, SettingsError):
            continue


@cache
def _builder() -> RequestBuilder:
    config = load_config(ROOT / "tests/data/serving.toml", {})
    checkpoint = read_checkpoint(str(TARGET))
    grammars = Grammars(checkpoint.tokenizer_file, checkpoint.vocab_size, checkpoint.eos_ids)
    return RequestBuilder(config, checkpoint, frozenset(config.drafters), grammars)


def _request(data: bytes) -> None:
    """The inputs of a request, which may come as JSON, and what follows from them."""
    _builder().build(read({}, data.decode(errors="replace")))


def _body(data: bytes) -> None:
    """The body of a completion or of a chat."""
    fields: Any = parse(ChatFields if data[:1] == b" " else CompletionFields, data)
    to_request(fields.inputs() | {"timeout_ms": 1})


def _head(data: bytes) -> None:
    """A head's safetensors, after the config.json whose length the first two bytes say."""
    length = struct.unpack("<H", data[:2].ljust(2, b"\0"))[0]
    _file("config.json", data[2 : 2 + length])
    _file("model.safetensors", data[2 + length :])
    table = torch.zeros(8, HIDDEN_SIZE)
    tables = TargetTables("target", table, table, 2, "fingerprint")
    with patch.object(load, "read_tables", lambda *_: tables):
        for kind in load.FORMATS:
            try:
                load.load_head(kind, str(_folder()), "target", torch.float32, torch.device("cpu"))
            except ServingError as error:
                assert str(error)


def _head_seeds() -> tuple[bytes, ...]:
    header = json.dumps(
        {
            "0.0.linear.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
            "0.0.linear.bias": {"dtype": "F32", "shape": [4], "data_offsets": [64, 80]},
            "0.1.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [80, 208]},
            "fc.weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [208, 336]},
        }
    ).encode()
    config = b'{"num_attention_heads": 1, "hidden_size": 4, "intermediate_size": 8, "vocab_size": 8}'
    content = struct.pack("<Q", len(header)) + header + bytes(336)
    return tuple(struct.pack("<H", len(each)) + each + content for each in (config, b"{}", b""))


def _checkpoint(data: bytes) -> None:
    """config.json of a target, its generation_config.json, and the manifests of compiled engines."""
    folder = _folder() / "checkpoint"
    if not folder.exists():
        folder.mkdir()
        (folder / "tokenizer.json").symlink_to(TARGET / "tokenizer.json")
    for name in ("config.json", "generation_config.json", NAME, LLM_NAME):
        (folder / name).write_bytes(data)
    for reader in (
        lambda: read_checkpoint(str(folder)),
        lambda: read_manifest(folder),
        lambda: read_llm_manifest(folder),
    ):
        try:
            reader()
        except ServingError as error:
            assert str(error)


@cache
def _tokenizer() -> Any:
    return read_checkpoint(str(TARGET)).tokenizer


def _tables(data: bytes) -> None:
    load_tables(_file(FILE, data).parent, _tokenizer())


REQUESTS = (
    b'{"text_input": "def", "max_tokens": 4, "speculation": "prompt_lookup+suffix", "stop_words": ["a", "b"]}',
    b'{"input_ids": [1, 2], "speculation": "eagle2", "speculation_config": "{\\"width\\": 4}", "logit_bias_ids": [1],'
    b' "logit_bias_weights": [0.5], "rule": "typical", "bad_words": "x", "temperature": 0.5}',
    b'{"text_input": "a", "guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{\\"type\\": \\"object\\"}"}',
    b'{"text_input": "a", "guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]{1,3}"}',
    b'{"text_input": "a", "speculation": "medusa", "speculation_config": "{\\"choices\\": [[0], [0, 0], [1]]}"}',
)
BODIES = (
    b'{"prompt": "def", "max_tokens": 4, "stop": ["a"], "logit_bias": {"5": 1.5}, "n": 2, "stream": true}',
    b' {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "response_format": '
    b'{"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}',
    b'{"prompt": [[1, 2], [3]], "prediction": {"type": "content", "content": "x"}, "speculation_config": {"width": 2}}',
)
MANIFEST = {
    "role": "target", "method": "medusa", "mode": "medusa", "gpu": "H100", "trtllm_version": "1", "image": "x",
    "num_ranks": 1, "max_batch_size": 1, "max_input_len": 8, "max_seq_len": 16, "max_draft_len": 4, "vocab_size": 8,
    "inputs": {"a": "b"}, "plan": {},
}  # fmt: skip

PARSERS = {
    "wire": Parser(_wire, _wire_seeds()),
    "deployment": Parser(
        _deployment, ((ROOT / "tests/data/serving.toml").read_bytes(), b'target = "x"\nplacement = "separate"\n')
    ),
    "environment": Parser(
        _environment,
        (
            b"SPECSERVE_HTTP_PORT=0\nSPECSERVE_READY_LIMIT_S=5\nGATEWAY_PORT=0",
            b"GATEWAY_REPLICAS=a:1\nSPECSERVE_LOG_LEVEL=info",
        ),
    ),
    "request": Parser(_request, REQUESTS),
    "body": Parser(_body, BODIES, (ApiError,)),
    "head": Parser(_head, _head_seeds()),
    "checkpoint": Parser(
        _checkpoint,
        (
            (TARGET / "config.json").read_bytes(),
            json.dumps(MANIFEST).encode(),
            b'{"vocab_size": 8, "max_position_embeddings": 64, "eos_token_id": [1, 2], "text_config": {"vocab_size": 8}}',
        ),
    ),
    "tables": Parser(_tables, ((ROOT / "models/ngram" / FILE).read_bytes()[:20_000],)),
}
