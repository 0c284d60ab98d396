#!/usr/bin/env python3
"""Stream text from the Triton model `speculative` over gRPC; text from accepted drafts is shown in colour.

Copy this one file: it needs numpy and tritonclient[grpc], and knows nothing of the server but its protocol.

    client = grpcclient.InferenceServerClient("localhost:8001")
    for chunk in stream(client, "def main(", max_tokens=64, speculation="prompt_lookup"):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import secrets
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

#: The options of `stream`, which are inputs of the model: type, and flag and help of the command, if it has the option.
OPTIONS: Mapping[str, tuple[type[Any], str, str]] = {
    **dict.fromkeys(("text_input", "cache_salt"), (np.object_, "", "")),
    **dict.fromkeys(("stream", "return_stats", "return_steps", "return_log_probs", "ignore_eos"), (np.bool_, "", "")),
    **dict.fromkeys(("allowed_token_ids", "stop_ids", "logit_bias_ids", "num_top_log_probs"), (np.int32, "", "")),
    "logit_bias_weights": (np.float32, "", ""),
    "stop_words": (np.object_, "--stop", "end before this text (repeatable)"),
    "speculation": (np.object_, "--method", "drafting method: none, prompt_lookup, draft_model, …"),
    "draft_text": (np.object_, "--draft-text", "the text that you expect, for the method predicted"),
    "speculation_config": (np.object_, "--method-config", 'JSON of the method\'s parameters: {"draft_len": 8}'),
    "max_tokens": (np.int32, "--max-tokens", "most tokens of output"),
    "temperature": (np.float32, "--temperature", "0 is greedy"),
    "top_k": (np.int32, "--top-k", "sample from the k most probable tokens"),
    "top_p": (np.float32, "--top-p", "sample from the most probable tokens of this total probability"),
    "min_p": (np.float32, "--min-p", "sample from tokens at least this probable, relative to the best"),
    "typical_p": (np.float32, "--typical-p", "sample from the most typical tokens of this total probability"),
    "repetition_penalty": (np.float32, "--repetition-penalty", "above 1: fewer tokens that prompt or output have"),
    "presence_penalty": (np.float32, "--presence-penalty", "above 0: fewer tokens that the output has"),
    "frequency_penalty": (np.float32, "--frequency-penalty", "above 0: the same, by how often the output has them"),
    "bad_words": (np.object_, "--ban", "never generate this (repeatable)"),
    "min_tokens": (np.int32, "--min-tokens", "do not end before so many tokens"),
    "guided_decoding_guide_type": (np.object_, "--guide-type", "what the text must match: json, json_schema or regex"),
    "guided_decoding_guide": (np.object_, "--guide", "the schema or the expression"),
    "rule": (np.object_, "--rule", "how drafts are accepted: coupled, rejection, block, or typical (lossy)"),
    "seed": (np.uint64, "--seed", "the same seed gives the same text, whatever the method"),
    "timeout_ms": (np.int32, "--timeout-ms", "deadline of the request"),
}
ONE_LINE = (
    "{num_tokens} tokens in {num_steps} steps · first token {first_token_s:.3f} s, then {tokens_per_s:.1f} tokens/s · "
    "acceptance length {acceptance_length:.2f} ({acceptance_length_without_bonus:.2f} without bonus) · {finish_reason}"
)
HEADER = "method                   same text  tokens  tokens/s  first token  acceptance length  speed-up"
ROW = (
    "{method:<24} {same:>9} {num_tokens:>7} {tokens_per_s:>9.1f} {first_token_s:>10.3f} s "
    "{acceptance_length:>18.2f} {speed_up:>9.2f}"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Chunk(NamedTuple):
    """One response: what its steps added, and when it arrived; only the last response has `totals`."""

    text: str
    ids: list[int]
    step_lengths: list[int]
    at_s: float
    totals: Mapping[str, Any]


@dataclass
class Generation:
    """One request: its responses in the order of arrival."""

    method: str
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def ids(self) -> list[int]:
        """The ids of the whole output."""
        return [token for chunk in self.chunks for token in chunk.ids]

    def numbers(self) -> dict[str, Any]:
        """Return the request's figures by name; decoding is everything after the first response."""
        totals = self.chunks[-1].totals if self.chunks else {}
        timed = [chunk for chunk in self.chunks if chunk.ids] or [Chunk("", [], [], 0.0, {})]
        decode_s, decoded = timed[-1].at_s - timed[0].at_s, sum(len(chunk.ids) for chunk in timed[1:])
        steps, accepted = totals.get("num_steps", 0), totals.get("total_accepted_draft_tokens", 0)
        return {
            "method": self.method,
            **totals,
            "num_tokens": len(self.ids),
            "first_token_s": timed[0].at_s,
            "decode_tokens": decoded,
            "decode_s": decode_s,
            "tokens_per_s": ratio(decoded, decode_s),
            "acceptance_length": ratio(len(self.ids), steps),
            "acceptance_length_without_bonus": ratio(accepted, steps),
        }


def ratio(part: float, whole: float) -> float:
    """Return part / whole, or 0 if the whole is 0."""
    return part / whole if whole else 0.0


def stream(
    client: Any, prompt: str, *, model: str = "speculative", limit_s: float = 120.0, **options: Any
) -> Generator[Chunk, None, None]:
    """Send one request and yield its responses as they arrive; closing the generator early cancels the request.

    `client` is a tritonclient.grpc.InferenceServerClient without a running stream. `limit_s` limits the whole request.
    `options` are those of OPTIONS; None is not sent. Raises ValueError for an invalid option, InferenceServerException
    for a broken connection or a request that the server refuses (its `status()` is None then).
    """
    with closing(stream_outputs(client, {"text_input": prompt, "stream": True, **options}, model, limit_s)) as pairs:
        yield from (to_chunk(outputs, at_s) for at_s, outputs in pairs)


def stream_outputs(
    client: Any, options: Mapping[str, Any], model: str = "speculative", limit_s: float = 120.0
) -> Generator[tuple[float, dict[str, Any]], None, None]:
    """Send a request as `stream`; yield, per response, the seconds until it arrived and its output arrays by name."""
    answers: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
    tensors, done, sent_s = to_inputs(options), False, time.perf_counter()
    client.start_stream(
        lambda result, error: answers.put((time.perf_counter() - sent_s, result, error)), stream_timeout=limit_s
    )
    try:
        with suppress(InferenceServerException):  # if the stream is broken already, `answers` has the reason
            client.async_stream_infer(model, tensors, enable_empty_final_response=True)
        while not done:
            at_s, result, error = answers.get(timeout=limit_s + 5)
            if error is not None:
                raise error
            response = result.get_response()
            done = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield at_s, {output.name: result.as_numpy(output.name) for output in response.outputs}
    finally:
        client.stop_stream(cancel_requests=not done)


def to_inputs(options: Mapping[str, Any]) -> list[Any]:
    """Return the tensors of the options that are set."""
    tensors = []
    for name, value in ((name, value) for name, value in options.items() if value is not None and value != []):
        if name not in OPTIONS:
            raise ValueError(f"unknown option {name!r} (allowed: {', '.join(OPTIONS)})")
        dtype, items = OPTIONS[name][0], value if isinstance(value, list) else [value]
        if dtype is np.object_:
            items = [item.encode() for item in items]
        elif issubclass(dtype, np.integer):
            limits = np.iinfo(dtype)
            if not limits.min <= min(items) <= max(items) <= limits.max:
                raise ValueError(f"{name} must be in {limits.min}..{limits.max}, got {value}")
        array = np.array([items], dtype=dtype)  # the outer dimension is the model's batch, always 1
        tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensors.append(tensor.set_data_from_numpy(array))
    return tensors


def to_chunk(outputs: Mapping[str, Any], at_s: float) -> Chunk:
    """Return one response from its output arrays."""
    values = {name: array.reshape(-1).tolist() for name, array in outputs.items()}
    text = b"".join(values.pop("text_output", [])).decode(errors="replace")
    ids, step_lengths, _ = (values.pop(name, []) for name in ("output_ids", "step_lengths", "num_output_tokens"))
    firsts = {name: items[0] for name, items in values.items() if items and "finish_reason" in values}
    totals = {name: value.decode() if isinstance(value, bytes) else value for name, value in firsts.items()}
    return Chunk(text, ids, step_lengths, at_s, totals)


def generate(client: Any, prompt: str, show: Callable[[Chunk], None] | None = None, **options: Any) -> Generation:
    """Run one request to its end and call `show` for each response; options as for `stream`."""
    generation = Generation(options.get("speculation") or "default")
    with closing(stream(client, prompt, **options)) as chunks:
        for chunk in chunks:
            generation.chunks.append(chunk)
            if show:
                show(chunk)
    return generation


def compare(
    client: Any, prompt: str, methods: Sequence[str], turns: int, warm_ups: int = 1, **options: Any
) -> list[list[Generation]]:
    """Run a prompt under each method in turn, each time from a cold cache; return the runs after the warm-ups."""
    runs: list[list[Generation]] = [[] for _ in methods]
    for turn in range(warm_ups + turns):
        for index in sorted(range(len(methods)), key=lambda i: (i + turn) % len(methods)):
            salted = {**options, "speculation": methods[index], "cache_salt": secrets.token_hex(8)}
            runs[index].append(generate(client, prompt, **salted))
    return [some[warm_ups:] for some in runs]


def comparison(runs: Sequence[Sequence[Generation]]) -> str:
    """Return a table of each method's median run, compared with that of the first method."""
    medians = [sorted(some, key=lambda run: run.numbers()["tokens_per_s"])[len(some) // 2] for some in runs]
    lines, first = [HEADER], medians[0]
    for some, median in zip(runs, medians, strict=True):
        row, same = median.numbers(), "yes" if all(run.ids == first.ids for run in some) else "NO"
        speed_up = ratio(row["tokens_per_s"], first.numbers()["tokens_per_s"])
        lines.append(ROW.format(**row, same=same, speed_up=speed_up))
    return "\n".join(lines)


class Painter:
    """Writes responses: text of steps that accepted drafts in two alternating colours, other text plain."""

    def __init__(self, out: TextIO) -> None:
        self.out, self._turn = out, 0
        self.colours = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def __call__(self, chunk: Chunk) -> None:
        """Write one response."""
        text = _CONTROL.sub("\ufffd", chunk.text) if self.out.isatty() else chunk.text  # it must not steer the terminal
        if self.colours and text and max(chunk.step_lengths, default=1) > 1:
            self._turn += 1
            text = f"\x1b[{36 - self._turn % 2 * 4}m{text}\x1b[0m"
        print(text, end="", file=self.out, flush=True)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the command's arguments, and the options for `stream`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompt", nargs="?", help="the text to continue (default: --file, else stdin)")
    parser.add_argument("--file", type=Path, help="read the prompt from a file")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (%(default)s)")
    parser.add_argument("--model", default="speculative", help="Triton model (%(default)s)")
    parser.add_argument("--compare", metavar="METHOD,…", help="run the prompt under each of these methods")
    parser.add_argument("--turns", type=int, default=3, help="runs per compared method (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    for name, (dtype, flag, text) in OPTIONS.items():
        if flag:
            kind = {np.float32: float, np.object_: str}.get(dtype, int)
            action = "append" if "repeatable" in text else "store"
            parser.add_argument(flag, dest=name, type=kind, action=action, help=text)
    args = parser.parse_args(arguments)
    try:
        if args.prompt is None:
            args.prompt = (args.file.read_bytes() if args.file else sys.stdin.buffer.read()).decode()
        options = {name: getattr(args, name, None) for name in OPTIONS if name != "text_input"}
        to_inputs({"text_input": args.prompt, **options})
    except (OSError, ValueError) as error:
        parser.error(str(error))
    limit_s = args.timeout_ms / 1000 + 5 if args.timeout_ms else 120.0
    return args, {**options, "stream": True, "model": args.model, "limit_s": limit_s}


def run(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Generate or compare, and print."""
    with grpcclient.InferenceServerClient(args.url) as client:
        if args.compare:
            options["seed"] = options["seed"] or 0  # without a seed, every run would choose its own
            runs = compare(client, args.prompt, args.compare.split(","), max(args.turns, 1), **options)
            print(json.dumps([run.numbers() for some in runs for run in some]) if args.json else comparison(runs))
            return
        done = generate(client, args.prompt, None if args.json else Painter(sys.stdout), **options)
        if args.json:
            print(json.dumps({"text": done.text, "ids": done.ids, **done.numbers()}))
        else:
            print(f"\n{ONE_LINE.format(**done.numbers())}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 for a request that the server refuses, 2 if there is no server."""
    args, options = parse(arguments)
    try:
        run(args, options)
    except KeyboardInterrupt:  # leaving `stream` has cancelled the request
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InferenceServerException, queue.Empty) as error:
        reason = str(error) or "the server does not answer"
        # A server that is full or draining sends this status, too; then its message begins with a code.
        is_down = "StatusCode.UNAVAILABLE" in reason and not re.search(r"\] [a-z_]+: ", reason)
        hint = f"no server at {args.url} ({reason}); start one (make serve), or name another with --url"
        print(f"error: {hint if is_down else reason}", file=sys.stderr)
        return 2 if is_down else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
