#!/usr/bin/env python3
"""Stream text from the Triton model `speculative` over HTTP (generate_stream); copy this file, it is stdlib only.

for event in stream("http://localhost:8000", {"text_input": "def main(", "max_tokens": 64}):
    print(event.get("text_output", ""), end="", flush=True)
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any
from urllib.parse import urlsplit


class ServerError(Exception):
    """The server refused the request; the message is the server's own."""


def stream(
    url: str, request: dict[str, Any], *, model: str = "speculative", limit_s: float = 65.0
) -> Generator[dict[str, Any], None, None]:
    """Send one request and yield its responses as they arrive; closing the generator early cancels the request.

    `request` holds the model's inputs by name. `limit_s` limits the time between two responses.
    Raises ServerError if the server refuses the request, even in the middle of the text, and OSError for a broken
    connection.
    """
    address = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname or "localhost", address.port, timeout=limit_s)
    path = f"{address.path.rstrip('/')}/v2/models/{model}/generate_stream"
    with contextlib.closing(connection):
        body = json.dumps({**request, "stream": True})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ServerError(refusal(response.read(1 << 20)))
        # Unless it is closed, the response keeps the socket open, and the request runs on.
        with contextlib.closing(response):
            yield from events(response)


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events: `data:` lines, joined up to the next empty line."""
    data: list[str] = []
    for line in chain(lines, [b""]):
        text = line.decode().rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text.removeprefix("data:").removeprefix(" "))
        elif not text and data:
            event: dict[str, Any] = json.loads("\n".join(data))
            if "error" in event:  # the status line was 200, sent before the error
                raise ServerError(event["error"])
            yield event
            data = []


def refusal(body: bytes) -> str:
    """Return the server's reason for a status that is not 200."""
    try:
        # Triton writes an error before any text in the form of an event.
        return str(json.loads(body.decode().removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or "the server gave no reason"


def integer_in(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of an argument that must fit into the server's input, to which Triton would cut it silently."""

    def integer(text: str) -> int:
        if not least <= (number := int(text)) <= most:
            raise argparse.ArgumentTypeError(f"must be in {least}..{most}, got {text}")
        return number

    return integer


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the command's arguments, and the request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompt", nargs="?", help="the text to continue (default: stdin)")
    parser.add_argument("--url", default="http://localhost:8000", help="the server (%(default)s)")
    parser.add_argument("--model", default="speculative", help="Triton model (%(default)s)")
    parser.add_argument("--method", dest="speculation", help="drafting method")
    parser.add_argument("--max-tokens", type=integer_in(-(2**31), 2**31 - 1), help="most tokens of output")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument("--top-p", type=float, help="sample from the most probable tokens of this total probability")
    parser.add_argument(
        "--seed", type=integer_in(0, 2**64 - 1), help="the same seed gives the same text, whatever the method"
    )
    parser.add_argument("--stop", dest="stop_words", action="append", help="end before this text (repeatable)")
    args = parser.parse_args(arguments)
    options = {name: value for name, value in vars(args).items() if name not in ("prompt", "url", "model")}
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    return args, {"text_input": prompt, **{name: value for name, value in options.items() if value is not None}}


def run(args: argparse.Namespace, request: dict[str, Any]) -> None:
    """Print the text as it arrives, then its figures."""
    sent_s, num_tokens, times, last = time.perf_counter(), [], [], {}
    with contextlib.closing(stream(args.url, request, model=args.model)) as responses:
        for last in responses:
            print(last.get("text_output", ""), end="", flush=True)
            if last.get("num_output_tokens"):
                num_tokens.append(last["num_output_tokens"])
                times.append(time.perf_counter() - sent_s)
    seconds = times[-1] - times[0] if times else 0.0
    rate = sum(num_tokens[1:]) / seconds if seconds else 0.0
    steps = last.get("num_steps", 0)
    print(
        f"\n{sum(num_tokens)} tokens in {steps} steps · first token {times[0] if times else 0:.3f} s, then "
        f"{rate:.1f} tokens/s · acceptance length {sum(num_tokens) / max(steps, 1):.2f} · {last.get('finish_reason')}",
        file=sys.stderr,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 for a request that the server refuses, 2 if there is no server."""
    args, request = parse(arguments)
    try:
        run(args, request)
    except KeyboardInterrupt:  # closing the connection has cancelled the request
        return 130
    except BrokenPipeError:  # the reader of our output has gone, or the server during our request
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, http.client.HTTPException) as error:
        print(f"error: no answer from {args.url} ({error}); start a server, or name one with --url", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
