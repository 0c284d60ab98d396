"""`make paper`: the papers' experiments on the real server, as JSON, a page and a picture."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpcclient
from transformers import AutoTokenizer
from tritonclient.utils import InferenceServerException

import launcher
from benchmarks import report
from benchmarks.deployment import CONFIG, ROOT, TASKS
from benchmarks.paper.conversations import Conversation, Writer, held_out, read_conversations
from benchmarks.paper.experiments import EXPERIMENTS, settings_of
from benchmarks.paper.figures import summary
from benchmarks.paper.measuring import Measured, measure
from benchmarks.paper.page import page
from benchmarks.paper.picture import draw
from orchestrator.core.deployment.config import ServingConfig, load_config
from orchestrator.core.errors import ServingError


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's arguments."""
    names = [experiment.name for experiment in EXPERIMENTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="the deployment")
    parser.add_argument("--url", help="gRPC address of a running server of this deployment; else one is started")
    parser.add_argument("--experiments", nargs="+", choices=names, default=names, help="to run (%(default)s)")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="held-out prompts (%(default)s)")
    parser.add_argument(
        "--prompts", nargs="+", type=Path, metavar="FILE.jsonl", help="prompts with turns and category, used instead"
    )
    parser.add_argument("--num-prompts", type=int, default=8, help="prompts per task or category (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs at temperature 1 (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/figures", help="for paper.json, .md and .svg, and paper-runs.jsonl"
    )
    args = parser.parse_args(arguments)
    if min(args.num_prompts, args.max_tokens) < 1:
        parser.error("--num-prompts and --max-tokens must be at least 1")
    return args


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """Yield the server's gRPC address; without --url the server is started here."""
    if args.url:
        yield args.url
    else:
        with launcher.Server(args.config) as server:
            yield server.grpc_url


def conversations_of(args: argparse.Namespace) -> list[Conversation]:
    """Return the conversations that the arguments name."""
    if args.prompts:
        return [each for file in args.prompts for each in read_conversations(file, args.num_prompts)]
    return held_out(args.tasks, args.num_prompts)


def experiment(args: argparse.Namespace, config: ServingConfig, url: str) -> None:
    """Run the experiments and publish them."""
    chosen = [each for each in EXPERIMENTS if each.name in args.experiments]
    conversations = conversations_of(args)
    writer = Writer(AutoTokenizer.from_pretrained(config.target, trust_remote_code=False))
    with grpcclient.InferenceServerClient(url) as client:
        about = report.conditions(config, client.get_server_metadata(client_timeout=10).version)
        about |= {"max_tokens": args.max_tokens, "seed": args.seed, "chat_template": writer.has_template}
        measured = measure(
            client, settings_of(chosen, config.drafters), conversations, writer, args.max_tokens, args.seed, _progress
        )
    about["finished"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "paper.md").write_text(page(chosen, measured, about), encoding="utf-8")
    summaries = [summary(measured, each) for each in measured.settings]
    draw([each for each, of in zip(summaries, measured.settings, strict=True) if of != of.base], args.out / "paper.svg")
    figures: dict[str, Any] = {
        "settings": [asdict(each) for each in measured.settings],
        "summaries": [asdict(each) for each in summaries],
        "published": {each.name: [found._asdict() for found in each.published] for each in chosen},
        "prompts": {name: _described(measured, name) for name in measured.places},
    }
    report.save(args.out / "paper.json", about, figures, [], [])
    report.save_runs(args.out / "paper-runs.jsonl", measured.samples)  # megabytes, and not committed
    print(f"saved in {args.out}: paper.json, paper.md, paper.svg, paper-runs.jsonl", file=sys.stderr)


def _described(measured: Measured, name: str) -> dict[str, Any]:
    place = measured.places[name]
    return {"task": place.conversation.task, "category": place.conversation.category, "turn": place.number}


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty() or done % 50 == 0 or done == total:
        print(f"\r{done}/{total} requests", end="\n" if done == total else "", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 when a prompt file, the deployment or the server is not in order."""
    args = parse(arguments)
    try:
        config = load_config(args.config)
        conversations_of(args)  # before a server is started for them
        with serving(args) as url:
            experiment(args, config, url)
    except KeyboardInterrupt:
        return 130
    except (ServingError, InferenceServerException, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
