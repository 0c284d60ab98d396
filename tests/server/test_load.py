"""Load tests against a real server: locust alone and with two workers; a text that changes is a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clients import load
from launcher.server import Server
from tests.support.gateway import running_gateway

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = [
        "the quick brown fox jumps over the lazy dog the quick",
        "def main(argv):\n    return main(argv",
        "a b a b a",
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def locust(server: Server, prompts: Path, folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run locust for a few seconds; return its exit status, the records and its output."""
    command = [
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "clients/locustfile.py"), "--headless", "--only-summary"),
        *("--grpc", server.grpc_url, "--http", server.http_url, "--prompts", str(prompts), "--max-tokens", "16"),
        *("-t", "3s", "--stop-timeout", "30", "--records", str(folder / "r.jsonl"), "--csv", str(folder / "csv")),
        *("--texts", str(folder / "texts.json"), *arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)
    lines = (folder / "r.jsonl").read_text().splitlines()
    return done.returncode, [json.loads(line) for line in lines], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("user", "arrivals"),
    [
        ("GrpcStream", ["-u", "2"]),
        ("HttpStream", ["-u", "2"]),
        ("GrpcStream", ["-u", "1", "--arrivals", "poisson", "--rate", "4"]),
        ("GrpcStream", ["--arrivals", "step", "--steps", "1,3", "--step-seconds", "2"]),
    ],
    ids=["grpc", "http", "poisson", "step"],
)
def test_users_stream_texts_that_never_change(
    server: Server, prompts: Path, tmp_path: Path, user: str, arrivals: list[str]
) -> None:
    status, records, output = locust(
        server, prompts, tmp_path, user, "--methods", "none,prompt_lookup,draft_model", *arrivals
    )
    assert status == 0, output
    assert len(records) >= 6 and not [found["error"] for found in records if found["error"]]
    assert {found["method"] for found in records} == {"none", "prompt_lookup", "draft_model"}
    texts = {(found["prompt"], found["text"]) for found in records}
    assert len(texts) == len({prompt for prompt, _ in texts}) > 1
    assert all(found["num_steps"] == found["num_tokens"] for found in records if found["method"] == "none")
    for name in ("first token, ms", "inter-chunk, us", "tokens/s", "acceptance length x100"):
        assert name in output and name in (tmp_path / "csv_stats.csv").read_text()


def test_texts_through_a_gateway_are_those_of_the_server(
    server: Server, checkpoints: Path, prompts: Path, tmp_path: Path
) -> None:
    methods = ("--methods", "none,prompt_lookup", "-u", "2")
    assert locust(server, prompts, tmp_path, "GrpcStream", *methods)[0] == 0
    with running_gateway(server.grpc_url, checkpoints / "target") as gateway:
        status, records, output = locust(server, prompts, tmp_path, "OpenAIStream", "--openai", gateway.url, *methods)
    assert status == 0, output
    through = [found for found in records if found["protocol"] == "openai"]
    assert through and all(found["num_tokens"] and found["num_steps"] for found in through)


def test_another_text_is_a_failure(server: Server, prompts: Path, tmp_path: Path) -> None:
    key = "max_tokens=16 temperature=0.0 seed=1"
    (tmp_path / "texts.json").write_text(json.dumps({f"prompts-{at} {key}": "planted" for at in range(3)}))
    status, records, output = locust(server, prompts, tmp_path, "GrpcStream", "-u", "1")
    assert status == 1 and all("another text" in found["error"] for found in records), output


def test_a_matrix_with_two_workers_has_a_report(server: Server, prompts: Path, tmp_path: Path) -> None:
    arguments = [
        *("--methods", "suffix,none", "--users", "2", "--seconds", "3", "--warm-up", "0.5", "--max-tokens", "16"),
        *("--workers", "2", "--url", server.grpc_url, "--prompts", str(prompts)),
        *("--json", str(tmp_path / "load.json"), "--html", str(tmp_path / "load.html")),
    ]
    assert load.main(arguments) == 0
    cells = json.loads((tmp_path / "load.json").read_text())
    assert [(cell["method"], cell["users"]) for cell in cells] == [("none", 2), ("suffix", 2)]
    assert all(cell["num_streams"] > 0 and cell["tokens_per_s"] > 0 for cell in cells)
    assert "<svg" in (tmp_path / "load.html").read_text()


def test_both_workers_make_load_and_the_master_compares_their_texts(
    server: Server, prompts: Path, tmp_path: Path
) -> None:
    args = load.parse(["--workers", "2", "--url", server.grpc_url, "--seconds", "3", "--warm-up", "1"])
    args.max_tokens = 16
    runs = load.Runs(args, server.grpc_url, prompts, tmp_path)
    assert runs.run("prompt_lookup", 2).num_errors == 0
    (records,) = tmp_path.glob("????????.jsonl")
    assert len({json.loads(line)["process"] for line in records.read_text().splitlines()}) == 2
    texts = json.loads((tmp_path / "texts.json").read_text())
    (tmp_path / "texts.json").write_text(json.dumps(dict.fromkeys(texts, "planted")))
    planted = runs.run("prompt_lookup", 2)
    assert planted.num_different == planted.num_errors > 0
