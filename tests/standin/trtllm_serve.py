"""NOT trtllm-serve: the real schema's gRPC server over a stock model, as strict as NVIDIA's published contract.

For tests: passes, how many each request may run; poison, a token id whose requests fail; aborted, requests, most_at_once;
counts, whether it reports draft tokens (the published servicer leaves both counts 0); merge, passes in one message.
"""

import json
import threading
import time
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
from smg_grpc_proto.generated import trtllm_service_pb2 as pb
from smg_grpc_proto.generated.trtllm_service_pb2_grpc import (
    TrtllmServiceServicer,
    add_TrtllmServiceServicer_to_server,
)

from tests.standin.decoding import distribution, guess, load, verify

CONTRACT = json.loads((Path(__file__).parents[1] / "data/trtllm/contracts/llm_api_1.3.json").read_text())
KINDS = {"str": str, "int": int, "bool": bool, "float": (int, float), "dict": dict, "list": list, "null": type(None)}
POLL_S = 0.005


def check_fields(where, values, declared):
    """Raise ValueError for a name that NVIDIA does not have, or a value of another type."""
    for name, value in values.items():
        if name not in declared:
            raise ValueError(f"{where}: extra fields not permitted: {name}")
        if type(value) not in [KINDS[kind] for kind in declared[name]["type"].split("|")]:
            raise ValueError(f"{where}.{name} must be {declared[name]['type']}, got {value!r}")


def check_speculation(options):
    """Raise ValueError where the classes of llm_args.py would."""
    config = dict(options["speculative_config"])
    kind = config.pop("decoding_type")
    if kind not in CONTRACT["types"]:
        raise ValueError(f"decoding_type {kind!r} is not one of {', '.join(CONTRACT['types'])}")
    check_fields(kind, config, CONTRACT["common"] | CONTRACT["types"][kind])
    if config.get("max_draft_len", 0) < 1:
        raise ValueError(f"max_draft_len must be > 0 for {kind}")
    drafter = config.get("speculative_model")
    if (kind in CONTRACT["with_model"]) is not bool(drafter and (Path(drafter) / "config.json").is_file()):
        raise ValueError(f"speculative_model {drafter!r} for {kind}")
    if kind in CONTRACT["disable_overlap_scheduler"] and not options.get("disable_overlap_scheduler"):
        raise ValueError(f"{kind} needs disable_overlap_scheduler")


class TrtllmServe(TrtllmServiceServicer):
    """The server of one command line; folder: where its --config file is."""

    version = "1.3.0rc27"

    def __init__(self, command, folder):
        program, self.checkpoint, *words = command
        assert program == "trtllm-serve"
        flags = self._flags(words)
        options = json.loads((Path(folder) / flags["--config"]).read_text())
        check_fields("options", options, CONTRACT["options"])
        if "speculative_config" in options:
            check_speculation(options)
        self.options, self.flags = options, flags
        self.draft_len = options.get("speculative_config", {}).get("max_draft_len", 0)
        self.max_seq_len, self.vocab_size = flags["--max_seq_len"], load(self.checkpoint).config.vocab_size
        longest = flags["--max_num_tokens"]
        self.longest_prompt = self.max_seq_len if options["enable_chunked_prefill"] else longest
        self.passes, self.poison, self.requests = float("inf"), None, []
        self.aborted, self.completed = [], []
        self.most_at_once, self.counts, self.merge, self.health = 0, True, 1, "OK"
        self._active, self._lock = 0, threading.Lock()

    @staticmethod
    def _flags(words):
        flags = {}
        while words:
            name = words.pop(0)
            kind = CONTRACT["serve"][name]["type"].split("|")[0]
            flags[name] = True if kind == "bool" else KINDS[kind](words.pop(0))
        assert flags.pop("--grpc"), "without --grpc it serves HTTP"
        return flags

    @contextmanager
    def listening(self, port=0):
        """Serve; yield the address."""
        server = grpc.server(futures.ThreadPoolExecutor(32))
        add_TrtllmServiceServicer_to_server(self, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield f"127.0.0.1:{bound}"
        finally:
            server.stop(0.2).wait(10)

    def HealthCheck(self, request, context):  # noqa: N802
        return pb.HealthCheckResponse(status=self.health)

    def GetServerInfo(self, request, context):  # noqa: N802
        tensor_parallel = self.flags["--tp_size"]
        return pb.GetServerInfoResponse(
            version=self.version, backend="tensorrt-llm", tensor_parallel_size=tensor_parallel,
            pipeline_parallel_size=1, context_parallel_size=1, world_size=tensor_parallel,
        )  # fmt: skip

    def GetModelInfo(self, request, context):  # noqa: N802
        return pb.GetModelInfoResponse(
            model_id=self.checkpoint, max_seq_len=self.max_seq_len, vocab_size=self.vocab_size
        )

    def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        self._check_reads(request)
        ids = list(request.tokenized.input_token_ids)
        if problem := self._problem(ids, request):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        with self._lock:
            self._active += 1
            self.most_at_once = max(self.most_at_once, self._active)
        context.add_callback(lambda: self._end(request, context))
        yield from self._passes(request, ids, context)

    def _end(self, request, context):
        with self._lock:
            self._active -= 1
            if context.code() is None and request.request_id not in self.completed:
                self.aborted.append(request.request_id)

    def _check_reads(self, request):
        """A field that the servicer does not read would be lost without a word."""
        for message in (request, request.sampling_config, request.output_config):
            for field, _ in message.ListFields():
                assert field.name in CONTRACT["reads"][message.DESCRIPTOR.name], f"{field.name} is not read"

    def _problem(self, ids, request):
        odd = [token for token in ids if token >= self.vocab_size]
        if odd or not ids:
            return f"the token {odd[:1]} is outside of the vocabulary"
        if len(ids) > self.longest_prompt:
            return f"{len(ids)} tokens of prompt exceed max_num_tokens {self.longest_prompt}"
        if len(ids) + request.max_tokens > self.max_seq_len:
            return f"{len(ids)} + {request.max_tokens} tokens exceed max_seq_len {self.max_seq_len}"
        return ""

    def _passes(self, request, ids, context):
        said, entries, sent, num_accepted, num_drafted = [], [], 0, 0, 0
        rng, config = np.random.default_rng(request.sampling_config.seed), request.sampling_config
        temperature = config.temperature if config.HasField("temperature") else 1.0
        top_p = config.top_p if config.HasField("top_p") else 1.0

        def pick(logits, _):
            return int(rng.choice(len(logits), p=distribution(logits, temperature, config.top_k, top_p)))

        number = 0
        while len(said) < request.max_tokens:
            while number >= self.passes and context.is_active():
                time.sleep(POLL_S)
            if not context.is_active():
                return
            if self.poison in ids:
                context.abort(grpc.StatusCode.INTERNAL, "poisoned\nby a test")
            room = min(self.draft_len if said else 0, request.max_tokens - len(said) - 1)
            drafts = guess(self.checkpoint, ids + said, room, rng)
            new, rows = verify(self.checkpoint, ids + said, drafts, pick)
            said += new
            entries += [entry_of(token, row, request) for token, row in zip(new, rows, strict=True)]
            number, num_accepted, num_drafted = number + 1, num_accepted + len(new) - 1, num_drafted + len(drafts)
            if request.streaming and (number % self.merge == 0 or len(said) >= request.max_tokens):
                chunk = pb.GenerateStreamChunk(
                    token_ids=said[sent:], completion_tokens=len(said), logprobs=filter(None, entries[sent:])
                )
                yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
                sent = len(said)
        counts = {"spec_accepted_tokens": num_accepted, "spec_draft_tokens": num_drafted} if self.counts else {}
        complete = pb.GenerateComplete(
            output_token_ids=said, finish_reason="length", completion_tokens=len(said),
            logprobs=filter(None, entries), **counts,
        )  # fmt: skip
        self.completed.append(request.request_id)
        yield pb.GenerateResponse(request_id=request.request_id, complete=complete)


def entry_of(token, row, request):
    """The log probability of a token, and the likeliest at its place; None where nobody asked."""
    if not request.output_config.HasField("logprobs"):
        return None
    log_p = row - row.max() - np.log(np.exp(row - row.max()).sum())
    top = [
        pb.TopLogprob(token_id=int(each), logprob=log_p[each])
        for each in np.argsort(-log_p, kind="stable")[: request.output_config.logprobs]
    ]
    return pb.TokenLogprob(token_id=token, logprob=log_p[token], top_logprobs=top)
