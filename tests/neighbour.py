"""`python -m tests.neighbour` (make neighbour): how long a reader waits for tokens while others ask for far more.

One reader streams plain texts from the shipped deployment: alone, beside clients that read as it does, beside as many
whose every step verifies a draft of 128 nodes, and beside as many that send one long prompt after the other, none of it
cached. Each load comes in several rounds by turns, since the speed of shared machines changes. Every text of the reader
is compared with that of its request alone.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from benchmarks.deployment import serving
from tests.support.clients import Stream

NUM_CLIENTS, NUM_TEXTS = 4, 8
READER = {"speculation": "none", "max_tokens": 96, "ignore_eos": True, "stream": True}
PROMPT_TOKENS = 1900
#: Loads of the other clients: the inputs of their requests, beside the text.
LOADS: Mapping[str, Mapping[str, Any] | None] = {
    "alone": None,
    "like the reader": READER,
    "drafts of 128 nodes": {
        **READER, "max_tokens": 512, "speculation": "ngram", "num_draft_tokens": 128
    },
    "long prompts": {"speculation": "none", "max_tokens": 1},
}  # fmt: skip
#: Such drafts or prompts may stretch the reader's time per token by this much of what it is alone.
AT_MOST = 4.0
#: So many nodes must have been drafted at each of the neighbours' steps, on average: the last ones have less room.
LEAST_NODES = 100


@dataclass
class Seen:
    """What the reader saw beside a load: its seconds per token by text, and its gaps between two responses.

    num_requests, nodes, faults: of the others, who drafted so many nodes a step.
    """

    per_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    nodes: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_requests: int = 0

    def row(self, name: str) -> str:
        """Return a row of the table, in ms."""
        gaps = sorted(self.gaps_s)
        figures = (median(self.per_token_s), gaps[len(gaps) // 2], gaps[int(0.95 * len(gaps))], gaps[-1])
        return f"| {name} | {self.num_requests} | {' | '.join(f'{1e3 * value:.1f}' for value in figures)} |"


def read_text(stream: Stream, number: int, seen: Seen) -> str:
    """Stream one text, note its times, return it."""
    stream.send("r", text_input=f"def function_{number}(value):\n", seed=number, **READER)
    times: list[float] = []
    text, num_tokens = "", 0
    while not (response := stream.receive()).final:
        assert not response.error, response.error
        values = response.values or {}
        text += values.get("text_output", "")
        num_tokens += len(values.get("output_ids", ()))
        times.append(time.monotonic())
    seen.gaps_s += [later - earlier for earlier, later in itertools.pairwise(times)]
    seen.per_token_s.append((times[-1] - times[0]) / max(num_tokens - 1, 1))
    return text


class Neighbours:
    """Clients that send one request after the other until they are stopped."""

    def __init__(self, url: str, inputs: Mapping[str, Any] | None, seen: Seen, seed: int) -> None:
        self._url, self._inputs, self._seen, self._seed = url, inputs or {}, seen, seed
        self._is_over = threading.Event()
        count = NUM_CLIENTS if inputs else 0
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, client: int) -> None:
        try:
            self._send(random.Random(f"{self._seed} {client}"), client)
        except Exception as error:
            self._seen.faults.append(f"client {client}: {error!r}")

    def _send(self, choose: random.Random, client: int) -> None:
        with Stream(self._url) as stream:
            while not self._is_over.is_set():
                prompt: dict[str, Any] = {"text_input": f"class Number{choose.randrange(1000)}:\n"}
                if self._inputs["max_tokens"] == 1:
                    prompt = {"input_ids": choose.choices(range(5, 4000), k=PROMPT_TOKENS)}
                last = stream.ask(**prompt, seed=client, **self._inputs).last
                self._seen.num_requests += 1
                self._seen.nodes.append(last["total_draft_tokens"] / last["num_steps"])


def measure(url: str, num_rounds: int) -> tuple[dict[str, Seen], list[str]]:
    """Read beside each load in turn; return what was seen, and the texts that differ."""
    results, texts, faults = {name: Seen() for name in LOADS}, dict[int, str](), list[str]()
    for turn in range(num_rounds):
        for name, inputs in LOADS.items():
            with ExitStack() as stack:
                stream = stack.enter_context(Stream(url))
                stack.enter_context(Neighbours(url, inputs, results[name], turn))
                time.sleep(1.0)  # until the others are under way
                for number in range(NUM_TEXTS):
                    text = read_text(stream, number, results[name])
                    if texts.setdefault(number, text) != text:
                        faults.append(f"text {number} {name}: {text!r}, alone {texts[number]!r}")
    return results, faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 for a wrong text or a factor above the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="(%(default)s)")
    options = parser.parse_args(arguments)
    with serving("float32") as server:
        results, faults = measure(server.grpc_url, options.rounds)
    print(
        "| 4 others | their requests | ms a token, p50 | gap p50 | gap p95 | gap max |\n|---|---:|---:|---:|---:|---:|"
    )
    print("\n".join(seen.row(name) for name, seen in results.items()))
    faults += [fault for seen in results.values() for fault in seen.faults]
    faults += [f"{name}: no request ended" for name in [*LOADS][1:] if not results[name].num_requests]
    if (nodes := mean(results["drafts of 128 nodes"].nodes)) < LEAST_NODES:
        faults.append(f"the neighbours drafted {nodes:.0f} nodes a step")
    for name in ("drafts of 128 nodes", "long prompts"):
        factor = median(results[name].per_token_s) / median(results["alone"].per_token_s)
        print(f"{name}: {factor:.1f} times the reader's time per token alone")
        if factor > AT_MOST:
            faults.append(f"{name}: {factor:.1f} times, not {AT_MOST:g}")
    for fault in faults[:10]:
        print(f"FAULT: {fault[:500]}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
