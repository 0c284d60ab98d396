"""`python -m benchmarks.neighbours`: how long a plain request waits for its tokens beside clients that ask for much.

One client reads a text without drafts: alone, beside clients that keep asking for the largest trees, alone again, and
beside clients that keep sending long prompts which nobody has cached. Prints the gaps between its responses.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import secrets
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from benchmarks.deployment import CONFIG
from benchmarks.traffic import ask, mixed_prompts, prompts_of_length, read_prompts
from clients.generate import stream
from launcher import Server
from orchestrator.deployment.config import load_config

DEEPEST = {"top_k": 32, "depth": 16}
GREEDIEST = {"eagle": {}, "eagle2": DEEPEST, "eagle3": DEEPEST, "redrafter": {"beams": 32, "beam_len": 8}}
NUM_TOKENS = 128
PROMPT_TOKENS = 1500
TIMEOUT_MS = 120_000

#: Returns the prompt and the options of a neighbour's next request.
Next = Callable[[], tuple[str, dict[str, Any]]]


def large_trees(method: str, number: int) -> Next:
    """Return a client that asks for the largest trees of a head."""
    prompt = mixed_prompts(number + 9)[number + 8].text
    config = json.dumps({**GREEDIEST[method], "max_nodes": 128})
    return lambda: (prompt, {"speculation": method, "speculation_config": config, "max_tokens": 96})


def long_prompts(number: int) -> Next:
    """Return a client whose long prompts share no cached block with anything before them."""
    prompts = prompts_of_length(load_config(CONFIG).target, read_prompts(), "long", PROMPT_TOKENS, 8)
    turns = itertools.cycle(prompts[number:] + prompts[:number])
    return lambda: (next(turns).text, {"speculation": "none", "max_tokens": 4, "cache_salt": secrets.token_hex(8)})


@contextlib.contextmanager
def beside(url: str, neighbours: Sequence[Next]) -> Iterator[None]:
    """Let each neighbour send one request after the other."""
    stop = threading.Event()

    def work(next_request: Next) -> None:
        with grpcclient.InferenceServerClient(url) as client:
            while not stop.is_set():
                prompt, options = next_request()
                with contextlib.suppress(InferenceServerException):  # past its deadline, or a full pool: try again
                    ask(client, prompt, timeout_ms=TIMEOUT_MS, **options)

    threads = [threading.Thread(target=work, args=(neighbour,), daemon=True) for neighbour in neighbours]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_MS / 1000)


def gaps_ms(url: str, runs: int) -> list[float]:
    """Return the times in ms between two responses of a plain request, of all runs."""
    found = []
    with grpcclient.InferenceServerClient(url) as client:
        for _ in range(runs):
            options: dict[str, Any] = {
                "speculation": "none",
                "max_tokens": NUM_TOKENS,
                "timeout_ms": TIMEOUT_MS,
                "ignore_eos": True,
            }
            times = [chunk.at_s for chunk in stream(client, mixed_prompts(1)[0].text, **options) if chunk.ids]
            found += [(after - before) * 1000 for before, after in itertools.pairwise(times)]
    return found


def row(name: str, gaps: Sequence[float]) -> str:
    """Return a row of the table."""
    p50, p95 = statistics.median(gaps), statistics.quantiles(gaps, n=20)[-1]
    return f"| {name} | {p50:.1f} | {p95:.1f} | {max(gaps):.1f} | {sum(gaps) / len(gaps):.1f} | {len(gaps)} |"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--beside", default="eagle2", choices=GREEDIEST, help="method of the large trees")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="texts in each situation, of 128 tokens (%(default)s)")
    options = parser.parse_args()
    situations: Mapping[str, Sequence[Next]] = {
        "alone": (),
        "beside 128-node trees": [large_trees(options.beside, number) for number in range(options.clients)],
        "alone, again": (),
        f"beside prompts of {PROMPT_TOKENS} tokens": [long_prompts(number) for number in range(options.clients)],
    }
    with Server(CONFIG) as server:
        gaps_ms(server.grpc_url, 1)
        print("| gaps between responses, ms | p50 | p95 | max | mean | number |\n|---|---:|---:|---:|---:|---:|")
        for name, neighbours in situations.items():
            with beside(server.grpc_url, neighbours):
                print(row(name, gaps_ms(server.grpc_url, options.runs)), flush=True)


if __name__ == "__main__":
    main()
