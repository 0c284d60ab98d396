"""The clients, the demo and the benchmark's measurements against the real server."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from benchmarks.deployment import settled_metrics
from benchmarks.samples import check_prefix_hits, measure
from benchmarks.server import Method, Passes, measure_concurrent
from benchmarks.traffic import Prompt
from clients import demo, generate, http_generate
from launcher import Server
from tests.server.conftest import deployment

#: What the demo shows of a deployment without heads.
LOADED = demo.methods_of(["draft"])
pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
#: The tiny target repeats N behind this prompt, so its text is as long as allowed, and easy to draft.
PROMPT, REPEATED = "dddd", "N"
#: A request to be cancelled, which takes seconds: its length, and a method whose drafts are never accepted.
LONG, SLOW = 500, "draft_model"


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(server.grpc_url) as made:
        yield made


def passes(server: Server) -> Passes:
    found = settled_metrics(server)
    return Passes(found["target", "passes_total"], found["target", "pass_requests_total"])


def arguments(server: Server, module: ModuleType) -> list[str]:
    """Return the arguments by which a client finds the server."""
    return ["--url", server.grpc_url if module is generate else server.http_url]


def test_stream_joined_is_the_whole_output(client: Any) -> None:
    done = generate.generate(client, PROMPT, speculation="prompt_lookup", max_tokens=20)
    numbers = done.numbers()

    assert done.text == REPEATED * 20
    assert len(done.ids) == numbers["num_tokens"] == sum(sum(c.step_lengths) for c in done.chunks) == 20
    assert (numbers["finish_reason"], numbers["num_input_tokens"]) == ("length", 4)
    assert numbers["num_steps"] == sum(len(c.step_lengths) for c in done.chunks) < 20
    assert numbers["acceptance_length"] == numbers["acceptance_length_without_bonus"] + 1


@pytest.mark.parametrize("module", [generate, http_generate])
def test_client_prints_the_text_and_what_it_took(server: Server, module: ModuleType, capsys: Any) -> None:
    status = module.main([PROMPT, "--max-tokens", "12", "--method", "prompt_lookup", *arguments(server, module)])

    printed = capsys.readouterr()
    assert (status, printed.out) == (0, REPEATED * 12)
    assert printed.err.startswith("\n12 tokens in ")
    assert printed.err.endswith(" · length\n")


def test_client_prints_json_when_asked(server: Server, capsys: Any) -> None:
    status = generate.main([PROMPT, "--json", "--stop", REPEATED * 5, *arguments(server, generate)])

    found = json.loads(capsys.readouterr().out)
    assert (status, found["text"], found["finish_reason"], found["num_tokens"]) == (0, "", "stop", 5)


def test_client_compares_methods(server: Server, capsys: Any) -> None:
    methods = "none,prompt_lookup,draft_model"
    sampled = ["--temperature", "0.9", "--max-tokens", "16", "--turns", "2"]
    status = generate.main(["abcabc", "--compare", methods, *sampled, *arguments(server, generate)])

    lines = capsys.readouterr().out.splitlines()
    assert (status, lines[0]) == (0, generate.HEADER)
    assert [line.split()[:2] for line in lines[1:]] == [[method, "yes"] for method in methods.split(",")]


@pytest.mark.parametrize("module", [generate, http_generate])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [(["--method", "medusaa"], "medusaa"), (["--max-tokens", "-1"], "max_tokens"), (["--model", "nope"], "nope")],
)
def test_client_prints_a_refusal_in_one_line(
    server: Server, module: ModuleType, wrong: list[str], words: str, capsys: Any
) -> None:
    assert module.main([PROMPT, *wrong, *arguments(server, module)]) == 1

    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert words in printed.err
    assert printed.err.count("\n") == 1


def test_closing_a_stream_stops_the_server(server: Server, client: Any) -> None:
    before = passes(server).passes
    chunks = generate.stream(client, PROMPT, speculation=SLOW, max_tokens=LONG)
    next(chunks)

    chunks.close()

    assert passes(server).passes - before < LONG


def test_closing_an_http_stream_stops_the_server(server: Server) -> None:
    before = passes(server).passes
    request = {"text_input": PROMPT, "speculation": SLOW, "max_tokens": LONG}
    events = http_generate.stream(server.http_url, request)
    next(events)

    events.close()

    assert passes(server).passes - before < LONG


@pytest.mark.parametrize("module", [generate, http_generate])
def test_ctrl_c_cancels_and_exits_130(server: Server, module: ModuleType) -> None:
    script = [sys.executable, str(ROOT / f"clients/{module.__name__.rpartition('.')[2]}.py")]
    request = [PROMPT, "--method", SLOW, "--max-tokens", str(LONG), *arguments(server, module)]
    # A shell's background job, which the tests may be, ignores Ctrl-C, and so would its children.
    as_in_a_terminal = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": as_in_a_terminal}
    with subprocess.Popen([*script, *request], **pipes) as running:
        assert running.stdout and running.stdout.read(1)

        running.send_signal(signal.SIGINT)

        _, error = running.communicate(timeout=60)
    assert (running.returncode, error) == (130, b"")


def test_methods_of_a_comparison_find_the_same_prefix_in_the_cache(client: Any) -> None:
    prompts = [Prompt(text, "tiny", text) for text in ("abcabcabcabcabcabcabcabc", "QQQQQQQQQQQQQQQQQQQQQQQQ")]
    methods = [Method(name, client) for name in LOADED]

    samples = list(measure(methods, prompts, 2, 8))

    assert check_prefix_hits(samples)
    assert {sample.run.num_cached_tokens for sample in samples} == {0}
    assert len({(sample.prompt, sample.run.ids) for sample in samples}) == len(prompts)


def test_crowd_is_measured_by_the_engines_count(server: Server) -> None:
    prompts = [Prompt(letter, "tiny", PROMPT + letter) for letter in "abcd"]

    (crowd,) = measure_concurrent([Method("none")], server.grpc_url, prompts, 1, 24, lambda: passes(server))

    steps = sum(run.num_steps for run in crowd.runs)
    assert len(crowd.runs) == 4
    assert crowd.requests_per_pass is not None and 1 <= crowd.requests_per_pass <= 4
    assert crowd.seen_per_pass is not None and crowd.requests_per_pass <= crowd.seen_per_pass + 1e-9
    assert steps >= sum(len(run.ids) for run in crowd.runs)


def test_demo_shows_the_same_text_and_ends(linked: Path, capsys: Any) -> None:
    config = deployment(linked, 'draft = "draft"')

    assert demo.main(["--config", str(config)]) == 0

    printed = capsys.readouterr().out
    for method in (demo.PLAIN, demo.DEFAULT):
        assert printed.count(f"── {method} ") == demo.NUM_STREAMED
    same = dict(line.split()[:2] for line in printed.splitlines() if " × " in line)
    number = len(demo.QUESTIONS)
    assert same == {method: "1/1" if method == demo.PREDICTED else f"{number}/{number}" for method in LOADED}
    assert "make gateway" in printed.splitlines()[-1]


def test_demo_fails_when_a_text_differs(capsys: Any) -> None:
    totals = {"num_steps": 2, "total_accepted_draft_tokens": 1, "finish_reason": "stop"}
    runs = {
        (method, demo.QUESTIONS[0]): generate.Generation(method, [generate.Chunk("", ids, [3], 1.0, totals)])
        for method, ids in (("none", [1, 2, 3]), ("auto", [1, 2, 4]))
    }

    assert not demo.report(runs)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["1/1", "0/1"]
