"""The sampling options over the wire: each option with its Sampling, answers by sequence, and the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import torch
from tokenizers import Tokenizer
from tritonclient.grpc import InferResult, service_pb2_grpc

from auditor.reference.decoding import Legal, generate
from benchmarks.stock_model import StockModel
from launcher import Server
from orchestrator.core.grammar import Grammars
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Sampling
from tests.support import clients
from tests.support.clients import Http, infer_request

LIMIT_S = 300.0
EOS = 0
NUM_TOKENS = 12
TARGET = Path(__file__).resolve().parents[2] / "models/target"
DEMO = Tokenizer.from_file(str(TARGET / "tokenizer.json"))

Part = Mapping[str, np.ndarray]


class Refused(Exception):
    """The server refused a request; the message is the server's."""


@dataclass
class Said:
    """One sequence's whole answer. totals: the outputs of its last response."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)

    def take(self, part: Part, index: int) -> None:
        """Add the part of sequence `index` of a response."""
        counts = part["num_output_tokens"][0].tolist()
        own = slice(sum(counts[:index]), sum(counts[: index + 1]))
        self.text += part["text_output"].reshape(-1)[index].decode()
        self.ids += part["output_ids"][0, own].tolist()
        if "output_log_probs" in part:
            self.logprobs += part["output_log_probs"][0, index, : counts[index]].tolist()
        if "top_ids" in part:
            self.top_ids += part["top_ids"][0, own].tolist()
            self.top_logprobs += part["top_log_probs"][0, own].tolist()
        self.totals = {name: _place(values, index) for name, values in part.items()}


def _place(values: np.ndarray, index: int) -> Any:
    flat = values.reshape(-1).tolist()
    value = flat[min(index, len(flat) - 1)] if flat else None
    return value.decode() if isinstance(value, bytes) else value


def sequences(parts: Iterable[Part]) -> list[Said]:
    """Join the responses of one request by sequence."""
    found: dict[int, Said] = {}
    for part in parts:
        first = int(part["sequence_index"][0, 0]) if "sequence_index" in part else 0
        for index in range(part["text_output"].size):
            found.setdefault(first + index, Said()).take(part, index)
    return [found[index] for index in range(len(found))]


class Door:
    """Requests to a server over each of its protocols; any thread may call."""

    def __init__(self, server: Server) -> None:
        self._http_url = server.http_url
        self._channel = grpc.insecure_channel(server.grpc_url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def parts(self, **inputs: Any) -> list[Part]:
        """Return the responses over a gRPC stream; raises Refused."""
        request = infer_request("speculative", "r", **inputs)
        messages = list(self._stub.ModelStreamInfer(iter([request]), timeout=LIMIT_S))
        if errors := [message.error_message for message in messages if message.error_message]:
            raise Refused(errors[0])
        return [_part(message.infer_response) for message in messages if message.infer_response.outputs]

    def ask(self, **inputs: Any) -> Said:
        """Return the answer of a request for one sequence."""
        (said,) = sequences(self.parts(**inputs))
        return said

    def unary(self, **inputs: Any) -> Part:
        """Return the one response over unary gRPC."""
        return _part(self._stub.ModelInfer(infer_request("speculative_unary", "u", **inputs), timeout=LIMIT_S))

    def http(self, **inputs: Any) -> Http:
        """Return the answer over /generate."""
        return clients.generate(self._http_url, inputs)

    def crowd(self, jobs: Mapping[Any, Mapping[str, Any]], at_once: int = 16) -> dict[Any, Said]:
        """Return the answers to many requests, of which `at_once` run at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return dict(zip(jobs, pool.map(lambda inputs: self.ask(**inputs), jobs.values()), strict=True))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _part(message: Any) -> Part:
    result = InferResult(message)
    return {output.name: result.as_numpy(output.name) for output in message.outputs}


class Option(NamedTuple):
    """The inputs of a request, and the sampling and stops that they mean. words: stop words."""

    inputs: dict[str, Any]
    sampling: Sampling
    stop_ids: tuple[int, ...] = (EOS,)
    words: tuple[str, ...] = ()


class Truth:
    """`auditor.reference.decoding.generate` over the stock model in float64."""

    def __init__(self, num_threads: int = 1) -> None:
        torch.set_num_threads(num_threads)  # on a busy machine two spinning threads per process are slower than one
        self._plain = StockModel(TARGET)
        self.grammars = Grammars(TARGET / "tokenizer.json", self._plain.model.config.vocab_size, [EOS])
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    @torch.inference_mode()
    def rows(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """Return the logits after the prompt and every output token, (len(output) + 1, V), from one causal pass."""
        ids = torch.tensor([[*prompt, *output]])
        rows: np.ndarray = self._plain.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].numpy()
        return rows

    def says(self, option: Option, prompt: Sequence[int], like: Sequence[int]) -> list[int]:
        """Return the reference's output. like: the expected output, whose rows are computed in one pass for speed."""
        for number, row in enumerate(self.rows(prompt, like)):
            self._rows[(*prompt, *like[:number])] = row
        length = option.inputs.get("max_tokens", NUM_TOKENS)
        ids = generate(self._logits, prompt, option.sampling, length, option.stop_ids, self._legal(option))
        return _until_word(ids, option.words)

    def _logits(self, ids: Sequence[int]) -> np.ndarray:
        row = self._rows.get(tuple(ids))
        return self._plain.logits(list(ids)) if row is None else row

    def _legal(self, option: Option) -> Legal | None:
        logits_options = option.sampling.logits_options
        if not logits_options.grammar:
            return None
        matcher = self.grammars.matcher(logits_options.grammar, option.stop_ids)

        def legal(output: Sequence[int]) -> np.ndarray:
            matcher.follow(output)
            return matcher.legal([])

        return legal


def _until_word(ids: list[int], words: Sequence[str]) -> list[int]:
    """Return the ids up to the first that completes a stop word."""
    ends = [n for n in range(1, len(ids) + 1) if any(word in DEMO.decode(ids[:n]) for word in words)]
    return ids[: ends[0]] if ends else ids


def encoded(text: str) -> tuple[int, ...]:
    """Return the tokens of a text that is in the middle of another."""
    return tuple(DEMO.encode(text, add_special_tokens=False).ids)


def _drawn(
    inputs: Mapping[str, Any] | None = None, logits_options: LogitsOptions | None = None, **changes: Any
) -> Option:
    """Return an option at temperature 0.9; `changes` have the same names in the inputs and in Sampling."""
    numbers = {"temperature": 0.9, "seed": 12, **changes}
    kept = {name: float(np.float32(v)) if isinstance(v, float) else v for name, v in numbers.items()}
    return Option(
        {**numbers, **(inputs or {})}, Sampling(**kept, logits_options=logits_options or LogitsOptions(end_ids=(EOS,)))
    )


def _guided(kind: str, guide: str = "", **inputs: Any) -> Option:
    asked = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide, **inputs}
    return _drawn(asked, LogitsOptions(grammar=Grammar(kind, guide), end_ids=(EOS,)))


NEWLINE = encoded("\n")[0]
BIASED = [NEWLINE, *encoded("return")]
BAD = tuple(dict.fromkeys(encoded(text) for word in ("name", "def", "_is") for text in (word, f" {word}")))
BIAS_WORDS = tuple((token, float(np.float32(4.5))) for token in encoded(" name text"))
ALLOWED = tuple(range(1, 400))
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "size": {"enum": [1, 22, 333]}}, '
    '"required": ["name", "size"], "additionalProperties": false}'
)
REGEX = "(left|right|up|down)-[0-9]{2,4}(;|!)"

OPTIONS: dict[str, Option] = {
    "greedy": Option({}, Sampling()),
    "temperature": _drawn(),
    "random_seed": Option({"temperature": 2.0, "random_seed": 99}, Sampling(2.0, seed=99)),
    "top_k alone": Option({"top_k": 5, "seed": 3}, Sampling(1.0, top_k=5, seed=3)),
    "top_p": _drawn(top_p=0.7),
    "min_p": _drawn(min_p=0.1),
    "typical_p": _drawn(typical_p=0.4),
    "every cut": _drawn(top_k=50, top_p=0.9, min_p=0.01, typical_p=0.8),
    "repetition_penalty": Option(
        {"repetition_penalty": 1.5}, Sampling(repetition_penalty=1.5, logits_options=LogitsOptions(end_ids=(EOS,)))
    ),
    "repetition reward": _drawn(repetition_penalty=0.8),
    "presence_penalty": _drawn(presence_penalty=1.5),
    "frequency_penalty": _drawn(frequency_penalty=0.7),
    "frequency reward": _drawn(frequency_penalty=-1.0, presence_penalty=-0.5),
    "logit_bias": _drawn(
        {"logit_bias_ids": BIASED, "logit_bias_weights": [-2.0] + [3.0] * (len(BIASED) - 1)},
        LogitsOptions(bias=((NEWLINE, -2.0), *((token, 3.0) for token in BIASED[1:])), end_ids=(EOS,)),
    ),
    "embedding_bias": _drawn(
        {"embedding_bias_words": [" name text"], "embedding_bias_weights": [4.5]},
        LogitsOptions(bias=BIAS_WORDS, end_ids=(EOS,)),
    ),
    "bad_words": _drawn({"bad_words": ["name", "def", "_is"]}, LogitsOptions(bad_words=BAD, end_ids=(EOS,))),
    "allowed_token_ids": _drawn({"allowed_token_ids": list(ALLOWED)}, LogitsOptions(allowed=ALLOWED, end_ids=(EOS,))),
    "min_tokens": Option(
        {"min_tokens": 6, "stop_ids": [NEWLINE]},
        Sampling(min_tokens=6, logits_options=LogitsOptions(end_ids=(EOS, NEWLINE))),
        (EOS, NEWLINE),
    ),
    "min_length": Option(
        {"min_length": 4, "end_id": NEWLINE}, Sampling(min_tokens=4, logits_options=LogitsOptions(end_ids=(NEWLINE,))), (NEWLINE,)
    ),
    "stop_ids": _drawn({"stop_ids": [NEWLINE, *encoded("_")]})._replace(stop_ids=(EOS, NEWLINE, *encoded("_"))),
    "end_id": Option({"end_id": NEWLINE}, Sampling(), (NEWLINE,)),
    "stop_words": _drawn({"stop_words": ["e", "xyzzy"]})._replace(words=("e",)),
    "ends at EOS": _drawn(
        {"logit_bias_ids": [EOS], "logit_bias_weights": [9.0]}, LogitsOptions(bias=((EOS, 9.0),), end_ids=(EOS,))
    ),
    "ignore_eos": _drawn(
        {"logit_bias_ids": [EOS], "logit_bias_weights": [9.0], "ignore_eos": True}, LogitsOptions(bias=((EOS, 9.0),))
    )._replace(stop_ids=()),
    "json": _guided("json"),
    "json_schema": _guided("json_schema", SCHEMA, max_tokens=24),
    "regex": _guided("regex", REGEX, max_tokens=24),
    "all at once": _drawn(
        {"logit_bias_ids": [NEWLINE], "logit_bias_weights": [2.0], "bad_words": ["name", "def", "_is"],
         "allowed_token_ids": list(ALLOWED), "min_tokens": 5, "guided_decoding_guide_type": ""},
        LogitsOptions(bias=((NEWLINE, 2.0),), allowed=ALLOWED, bad_words=BAD, end_ids=(EOS,)),
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, top_k=40, top_p=0.9, min_p=0.01,
        typical_p=0.9, min_tokens=5,
    ),
}  # fmt: skip
