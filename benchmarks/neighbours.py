"""`python -m benchmarks.neighbours`: how much a request slows down beside others with the largest trees allowed.

One text is generated with the default settings, first alone, then beside clients that keep requesting the widest and
deepest trees of the same head. Prints seconds, steps and draft tokens of each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from typing import Any

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from benchmarks.deployment import CONFIG
from benchmarks.traffic import ask, mixed_prompts
from launcher import Server

DEEPEST = {"top_k": 32, "depth": 16}
GREEDIEST = {"eagle": {}, "eagle2": DEEPEST, "eagle3": DEEPEST, "redrafter": {"beams": 32, "beam_len": 8}}


def options_of(method: str, **parameters: Any) -> dict[str, Any]:
    """Return a request's options."""
    config = {"speculation_config": json.dumps(parameters)} if parameters else {}
    return {"speculation": method, "max_tokens": 96, "timeout_ms": 120_000} | config


def request_large_trees(url: str, method: str, stop: threading.Event, number: int) -> None:
    """Request large trees until `stop` is set."""
    options = options_of(method, **GREEDIEST[method], max_nodes=128)
    prompts = mixed_prompts(number + 9)
    with grpcclient.InferenceServerClient(url) as client:
        while not stop.is_set():
            with contextlib.suppress(InferenceServerException):  # past its deadline, or a full pool: try again
                ask(client, prompts[number + 8].text, **options)


def measured(url: str, method: str) -> str:
    """Generate one text and return its cost in words."""
    with grpcclient.InferenceServerClient(url) as client:
        began_s = time.monotonic()
        answer = ask(client, mixed_prompts(1)[0].text, **options_of(method))
        return f"{time.monotonic() - began_s:.1f} s, {answer.num_steps} steps, {answer.num_drafted} draft tokens"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", default="eagle", help="of the text that is measured")
    parser.add_argument("--beside", default="eagle2", choices=GREEDIEST, help="method of the others")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with Server(CONFIG) as server:
        for _ in range(options.runs):
            print("alone: ", measured(server.grpc_url, options.method), "| none:", measured(server.grpc_url, "none"))
        stop = threading.Event()
        others = [
            threading.Thread(target=request_large_trees, args=(server.grpc_url, options.beside, stop, n), daemon=True)
            for n in range(options.clients)
        ]
        for other in others:
            other.start()
        for _ in range(options.runs):
            print("beside:", measured(server.grpc_url, options.method), "| none:", measured(server.grpc_url, "none"))
        stop.set()
        for other in others:
            other.join(120.0)


if __name__ == "__main__":
    main()
