"""`python -m benchmarks.replay`: acceptance length of a proposer's options on known texts.

transformers generates the target's greedy texts once; then each setting drafts along them without a model. That gives
the exact acceptance length and nodes per step within seconds, for every method that does not read the target's tokens
at rejected nodes. The time of a node is not included: `make bench` measures it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.deployment import CONFIG, TASKS
from benchmarks.stock_model import StockModel
from benchmarks.traffic import Prompt, read_prompts
from orchestrator.core.accept import accept_coupled
from orchestrator.core.context import Context
from orchestrator.core.deployment.checkpoint import Checkpoint, read_checkpoint
from orchestrator.core.deployment.config import ServingConfig, load_config
from orchestrator.core.drafting import Limits
from orchestrator.core.proposal import Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.registry import select_method
from orchestrator.drafting.tables import Tables, load_tables
from orchestrator.server.statistics import Statistics

SETTINGS = (
    "prompt_lookup",
    'prompt_lookup:{"match": "frequent"}',
    'prompt_lookup:{"match": "leftmost"}',
    'prompt_lookup:{"match": "leftmost", "clip": true, "length": "fixed", "draft_len": 10}',
    'prompt_lookup:{"clip": true}',
    'prompt_lookup:{"max_ngram": 2}',
    'prompt_lookup:{"max_ngram": 5}',
    'prompt_lookup:{"draft_len": 5}',
    'prompt_lookup:{"draft_len": 10}',
    'prompt_lookup:{"draft_len": 32}',
    'prompt_lookup:{"length": "fixed", "draft_len": 10}',
    'prompt_lookup:{"length": "fixed", "draft_len": 20}',
    'prompt_lookup:{"branches": 2}',
    'prompt_lookup:{"branches": 4}',
    "suffix",
    'suffix:{"tree": false}',
    'suffix:{"factor": 1.0}',
    'suffix:{"factor": 2.0}',
    'suffix:{"factor": 4.0}',
    'suffix:{"min_prob": 0.03}',
    'suffix:{"min_prob": 0.3}',
    "ngram",
    'ngram:{"draft_len": 1}',
    'ngram:{"draft_len": 5}',
    'ngram:{"order": 1, "draft_len": 1}',
    'ngram:{"order": 2}',
    'ngram:{"order": 3}',
    "predicted",
    'predicted:{"draft_len": 8}',
    'predicted:{"draft_len": 32}',
    'predicted:{"max_ngram": 2}',
)


@dataclass(frozen=True)
class Text:
    """A prompt and the target's output."""

    prompt: Prompt
    prompt_ids: list[int]
    output: list[int]


class Deployment(NamedTuple):
    """The proposers' inputs besides the text."""

    checkpoint: Checkpoint
    tables: Tables | None


def replay(proposer: Proposer, text: Text, max_nodes: int) -> Statistics:
    """Run the loop's steps with a target that generates `text`; return the counts."""
    context, statistics = Context(text.prompt_ids), Statistics()
    ids = [*text.prompt_ids, *text.output]
    limits = Limits(len(text.output), len(ids), max_nodes)
    while len(context) < len(ids):
        proposal = proposer.propose(context, Sampling(), limits.budget(context)).cut(limits.budget(context))
        target_tokens = np.array([ids[len(context) + depth] for depth in proposal.tree.depths.tolist()], np.int32)
        accepted = accept_coupled(proposal.tree, target_tokens.tolist())
        acceptance = Acceptance(accepted.path, accepted.next_token)
        context.commit(acceptance.tokens(proposal.tree))
        proposer.observe(proposal.tree, acceptance)
        statistics.observe(proposal, acceptance, len(accepted.path) + 1, 0.0, 1.0)
    return statistics


def cells(setting: str, texts: Sequence[Text], deployment: Deployment) -> Iterator[str]:
    """Yield acceptance length and nodes per step for each task."""
    method, _, config = setting.partition(":")
    for task in TASKS:
        matching = [
            text for text in texts if text.prompt.task == task and (text.prompt.prediction or method != "predicted")
        ]
        tallies = [replay(_proposer(method, config, text, deployment), text, 128) for text in matching]
        steps = sum(tally.num_steps for tally in tallies)
        tokens = sum(sum(tally.step_lengths) for tally in tallies)
        nodes = sum(tally.num_draft_tokens for tally in tallies)
        yield f"{tokens / steps:.2f} ({nodes / steps:.1f})" if steps else "–"


def _proposer(method: str, config: str, text: Text, deployment: Deployment) -> Proposer:
    dependencies = ProposerDependencies(
        drafter_client=lambda name: None,  # type: ignore[arg-type, return-value]
        vocab_size=deployment.checkpoint.vocab_size,
        prediction=tuple(deployment.checkpoint.tokenizer.encode(text.prompt.prediction).ids),
        tables=deployment.tables,
    )
    return select_method(method, config, frozenset(), {}).proposer(dependencies)


def demo_deployment() -> tuple[ServingConfig, Deployment]:
    """Return the demo's settings, and what its proposers read."""
    config = load_config(CONFIG)
    checkpoint = read_checkpoint(config.target)
    tables = load_tables(config.ngram_tables, checkpoint.tokenizer) if config.ngram_tables else None
    return config, Deployment(checkpoint, tables)


def known_texts(config: ServingConfig, num_prompts: int, num_tokens: int, store: Path | None) -> list[Text]:
    """Return the target's greedy texts, read from the file `store` if it exists, otherwise saved there."""
    prompts = [prompt for task in TASKS for prompt in read_prompts()[task][:num_prompts]]
    kept: Mapping[str, Any] = json.loads(store.read_text()) if store and store.exists() else {}
    if not kept:
        stock, encode = StockModel(Path(config.target), "float32"), read_checkpoint(config.target).tokenizer.encode
        ids = {prompt.id: encode(prompt.text).ids for prompt in prompts}
        kept = {name: (prompt_ids, stock.greedy(prompt_ids, num_tokens)) for name, prompt_ids in ids.items()}
        if store:
            store.write_text(json.dumps(kept))
    return [Text(prompt, *kept[prompt.id]) for prompt in prompts]


def add_text_options(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    """Declare which texts are replayed; num_prompts: the default."""
    parser.add_argument("--num-prompts", type=int, default=num_prompts, help="prompts per task (%(default)s)")
    parser.add_argument("--num-tokens", type=int, default=128, help="tokens of a text (%(default)s)")
    parser.add_argument("--texts", type=Path, help="file in which the texts are kept for the next run")


def load_texts(options: argparse.Namespace) -> tuple[Deployment, list[Text]]:
    """Return what the demo's proposers read, and the texts that the options name."""
    config, deployment = demo_deployment()
    return deployment, known_texts(config, options.num_prompts, options.num_tokens, options.texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table: acceptance length, and in brackets draft nodes per step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help='method, or method:{"parameter": value}')
    add_text_options(parser, num_prompts=24)
    options = parser.parse_args(arguments)
    deployment, texts = load_texts(options)
    print(f"| setting | {' | '.join(TASKS)} |\n|---|{'---:|' * len(TASKS)}")
    for setting in options.settings:
        print(f"| `{setting}` | {' | '.join(cells(setting, texts, deployment))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
