"""`make demo`: a real model answers questions, with each drafting method the same text, mostly faster than without.

It starts the server with the launcher and is a client of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import launcher
from clients.generate import ONE_LINE, Generation, Painter, generate, ratio

ROOT = Path(__file__).resolve().parent.parent
METHODS = (
    "none", "auto", "prompt_lookup", "suffix", "lookahead", "jacobi", "recycling", "draft_model",
    "medusa", "eagle", "eagle2", "eagle3", "redrafter", "prompt_lookup+eagle2", "predicted",
)  # fmt: skip
#: The drafters of the methods that need one.
DRAFTERS = {
    "draft_model": "draft", "medusa": "medusa", "eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle3",
    "redrafter": "redrafter",
}  # fmt: skip
PLAIN, DEFAULT = METHODS[:2]
#: This method drafts from the text that the client expects, which the demo knows for a text to be edited.
PREDICTED = "predicted"
MAX_TOKENS = 96
NUM_STREAMED = 2
ROW = "{:<22}{:>10}{:>10}{:>10}{:>19}{:>13}"

DRAFT = (
    "The old lighthouse stood at the edge of the cliff. Every evening the keeper climbed the stairs, lit the lamp and "
    "wrote the weather into his book. The ships at sea trusted the light."
)


@dataclass(frozen=True)
class Question:
    """What a user asks. expected: most of the answer, if the client knows it; "" otherwise."""

    text: str
    expected: str = ""


QUESTIONS = (
    Question("What is the capital of France, and what is it known for?"),
    Question(f"Repeat this text, but write 'tower' instead of 'lighthouse':\n\n{DRAFT}", DRAFT),
    Question("Write a Python function that checks whether a number is prime, and explain it."),
    Question("Why is the sky blue? Answer in three sentences."),
)


@contextlib.contextmanager
def serving(config: Path) -> Iterator[tuple[Any, list[str]]]:
    """Start the server on free ports; yield a client and the server's methods."""
    print(heading("Starting Triton Inference Server"), flush=True)
    with (
        launcher.Server(config) as server,
        grpcclient.InferenceServerClient(server.grpc_url) as client,
    ):
        print(
            f"ready after {server.started_in_s:.1f} s on {server.grpc_url}: {', '.join(['target', *server.drafters])}",
            flush=True,
        )
        yield client, methods_of(server.drafters)


def methods_of(drafters: Sequence[str]) -> list[str]:
    """Return the methods that a server with these drafters has."""
    known = {"", *drafters}
    return [name for name in METHODS if {DRAFTERS.get(part, "") for part in name.split("+")} <= known]


def chat_of(config: Path) -> Callable[[str], str]:
    """Return the function that makes a prompt of a question, by the target's own chat template."""
    keys = tomllib.loads(config.read_text(encoding="utf-8"))
    target = os.environ.get("SERVING_TARGET") or keys["target"]
    source = str(config.parent / target) if (config.parent / target).exists() else target
    command = [sys.executable, "-m", "orchestrator.core.deployment.gguf_checkpoint", source]
    folder = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        return lambda text: text

    def prompt(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    return prompt


def show_answers(client: Any, questions: Sequence[Question], chat: Callable[[str], str]) -> None:
    """Stream each answer without drafts and with the default method."""
    paint = Painter(sys.stdout)
    print("Plain text was generated token by token. Each coloured stretch is one step that accepted drafts.")
    for question in questions:
        print(heading(question.text))
        for method in (PLAIN, DEFAULT):
            print(bold(f"── {method} "))
            prompt = chat(question.text)
            done = generate(client, prompt, paint, speculation=method, max_tokens=MAX_TOKENS, cache_salt=method)
            print(f"\n{dim(ONE_LINE.format(**done.numbers()))}", flush=True)


#: By method and question.
Runs = dict[tuple[str, Question], Generation]


def run_all(client: Any, questions: Sequence[Question], chat: Callable[[str], str], methods: Sequence[str]) -> Runs:
    """Answer each question with each method in turn, each time from a cold cache; the first one also as a warm-up."""
    found: Runs = {}
    for question in (questions[0], *questions):
        for method in methods:
            if method != PREDICTED or question.expected:
                expected = question.expected if method == PREDICTED else None
                inputs: dict[str, Any] = {"speculation": method, "draft_text": expected, "max_tokens": MAX_TOKENS}
                salt = secrets.token_hex(8)
                found[method, question] = generate(client, chat(question.text), cache_salt=salt, **inputs)
    return found


def report(runs: Runs) -> bool:
    """Print a line for each method; return False if a text differs from plain decoding's."""
    print(ROW.format("method", "same text", "tokens/s", "speed-up", "acceptance length", "first token"))
    all_same = True
    for method in dict.fromkeys(name for name, _ in runs):
        questions = [question for name, question in runs if name == method]
        num_same = sum(runs[method, each].ids == runs[PLAIN, each].ids for each in questions)
        all_same &= num_same == len(questions)
        own, plain = (pooled([runs[name, each].numbers() for each in questions]) for name in (method, PLAIN))
        rate, speed_up = own["tokens_per_s"], ratio(own["tokens_per_s"], plain["tokens_per_s"])
        cells = f"{rate:.0f}", f"{speed_up:.2f} ×", f"{own['acceptance_length']:.2f}", f"{own['first_token_s']:.3f} s"
        print(ROW.format(method, f"{num_same}/{len(questions)}", *cells))
    return all_same


def pooled(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the rates of several requests together, as ratios of totals, and the mean time of the first token."""
    total = {name: sum(run[name] for run in runs) for name in ("num_tokens", "num_steps", "decode_tokens", "decode_s")}
    return {
        "tokens_per_s": ratio(total["decode_tokens"], total["decode_s"]),
        "first_token_s": ratio(sum(run["first_token_s"] for run in runs), len(runs)),
        "acceptance_length": ratio(total["num_tokens"], total["num_steps"]),
    }


def heading(text: str) -> str:
    """Return the title of a part of the demo."""
    return "\n" + bold(f"━━ {text} ")


def bold(text: str) -> str:
    """Return the text in bold if the terminal shows colours."""
    return f"\x1b[1m{text}\x1b[0m" if Painter(sys.stdout).colours else text


def dim(text: str) -> str:
    """Return the text dimmed if the terminal shows colours."""
    return f"\x1b[2m{text}\x1b[0m" if Painter(sys.stdout).colours else text


def demo(config: Path) -> int:
    """Run the demo; return its exit status."""
    with serving(config) as (client, methods):
        chat = chat_of(config)
        show_answers(client, QUESTIONS[:NUM_STREAMED], chat)
        runs = run_all(client, QUESTIONS, chat, methods)
    print(heading("Is the text the same, and is it faster?"))
    print(f"{len(QUESTIONS)} questions, {MAX_TOKENS} tokens at most; methods in turn, each from a cold cache.")
    same = report(runs)
    if not same:
        print("error: a text differs from that of plain decoding", file=sys.stderr)
    return 0 if same else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a text differs or the server fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "serving.toml", help="the deployment (%(default)s)")
    args = parser.parse_args(arguments)
    began_s = time.monotonic()
    try:
        status = demo(args.config.absolute())
    except KeyboardInterrupt:
        return 130
    except (launcher.ServingError, InferenceServerException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(dim(f"\nThe demo took {time.monotonic() - began_s:.0f} s."))
    print(f"Next: {bold('make serve')}, and in another terminal the API (http://127.0.0.1:9000/v1) with a page to chat")
    print(f"(http://127.0.0.1:9000/): {bold('make gateway')}")
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # stops the server on the way out


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
