"""`python -m build.heads.sharpness FOLDER --kind KIND`: measure how sure a drafter may be; record it in config.json.

`python -m build.heads` does the same for the heads that it trains, `python -m build.models` for its draft model
(docs/methods/eagle.md, Confidence).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from build.data import Tokens
from build.errors import BuildError, run_command
from build.heads import measure
from build.heads.measure import DEPTH, TOP_K, Recorded, draft_columns, record_greedy
from build.heads.settings import KINDS
from build.heads.target import Batch, FrozenTarget, load_target
from build.heads.teacher_forcing import all_rows, draft_logits
from build.heads.text import heads_text
from build.losses import spread_windows
from build.workspace import MODELS, Workspace
from orchestrator.core.sampled_drafts import MAX_CANDIDATES
from runtime.models.heads.checkpoint.checks import SHARPNESS
from runtime.models.heads.checkpoint.load import load_head
from runtime.models.heads.engines.ranking import CANDIDATES
from runtime.models.heads.sharpness import LEAST, Sharpness

#: The only kind that is not a head.
DRAFT_MODEL = "draft"
#: The values of `Sharpness.argmax` that are tried.
TRIED = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
#: Windows of text on which q is compared with p; they are read one by one, since p is too large to be kept.
P_WINDOWS = 8


def measure_sharpness(head: nn.Module, target: FrozenTarget, greedy: Recorded, stream: Tokens) -> Sharpness:
    """Return the sharpness that fits a head. greedy: the target's continuations. stream: (n,), held-out text."""
    return Sharpness(argmax_sharpness(head, greedy), sampled_sharpness(head, _windows(target, stream)))


def measure_draft_model(draft: FrozenTarget, target: FrozenTarget, greedy: Recorded, stream: Tokens) -> Sharpness:
    """Return the sharpness that fits a draft model; greedy and stream as for a head."""
    pairs = ((draft.model(batch.tokens[:, :-1]).logits, batch.p) for batch in _windows(target, stream))
    return Sharpness(draft_model_sharpness(draft, greedy), rejected_share(pairs))


def _windows(target: FrozenTarget, stream: Tokens) -> Iterator[Batch]:
    """Yield windows of text with the target's p."""
    length = min(measure.WINDOW, len(stream) - 1)
    return (target.read(window.to(target.device)) for window in spread_windows(stream, P_WINDOWS, length))


@torch.no_grad()
def argmax_sharpness(head: nn.Module, greedy: Recorded) -> float:
    """Return the divisor of log q with which q best predicts whether a guess is the target's argmax.

    It has the lowest Brier score over the best guesses at all depths, given that all tokens before them are right:
    temperature scaling (Guo et al. 2017, arXiv:1706.04599) with a loss that a few badly wrong guesses cannot dominate.
    """
    scores = torch.zeros(len(TRIED))
    for batch in greedy.batches:
        roots = all_rows(batch.num_rows, DEPTH, batch.last.device)
        columns = draft_columns(head, batch.p.shape[-1]).to(batch.last.device)
        for depth, logits in enumerate(draft_logits(head, batch, roots, DEPTH), start=1):
            best = logits.float().topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
            is_right = best.indices == columns[roots.take(batch.tokens, depth + 1)][..., None]
            scores += brier_scores(best.values[:, greedy.first :], is_right[:, greedy.first :])
    return TRIED[int(scores.argmin())]


@torch.no_grad()
def draft_model_sharpness(draft: FrozenTarget, greedy: Recorded) -> float:
    """Return this divisor for a draft model, whose logits along the text are those of drafts that are right so far."""
    scores = torch.zeros(len(TRIED))
    for batch in greedy.batches:
        logits = draft.model(batch.tokens[:, :-1]).logits[:, greedy.first :].float()
        best = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
        scores += brier_scores(best.values, best.indices == batch.tokens[:, greedy.first + 1 :, None])
    return TRIED[int(scores.argmin())]


def brier_scores(best: Tensor, is_right: Tensor) -> Tensor:
    """Return the Brier score of the best guesses, summed over them, for each value of TRIED.

    best: (B, n, k), their logits. is_right: (B, n, k) bool.
    """
    guesses = is_right[..., : max(TOP_K)].float()
    confidences = ((best / sharpness).softmax(-1)[..., : max(TOP_K)] for sharpness in TRIED)
    return torch.stack([(each - guesses).square().sum().cpu() for each in confidences])


def sampled_sharpness(head: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the `rejected_share` of a head over all depths. batches: with the target's p."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            roots = all_rows(batch.num_rows, DEPTH, batch.last.device)
            ids: Tensor | None = getattr(head, "ids", None)
            p = batch.p if ids is None else batch.p[..., ids]
            for depth, logits in enumerate(draft_logits(head, batch, roots, DEPTH), start=1):
                yield logits, roots.take(p, depth)

    return rejected_share(pairs())


@torch.no_grad()
def rejected_share(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return κ such that the mean of κ · (1 − Σ q²) is that of 1 − Σ min(p, q), the rejection rate of samples of q.

    pairs: the drafter's logits and p, (B, n, V) each. q: over the MAX_CANDIDATES best tokens, at temperature 1.
    """
    rejected = doubted = 0.0
    for logits, p in pairs:
        best = logits.float().topk(min(MAX_CANDIDATES, logits.shape[-1]), dim=-1)
        q = best.values.softmax(-1)
        accepted = torch.minimum(q, p.gather(-1, best.indices)).sum(-1)
        rejected += float((1.0 - accepted).sum())
        doubted += float((1.0 - q.square().sum(-1)).sum())
    return round(min(max(rejected / doubted if doubted else 1.0, LEAST), 1.0), 3)


def record(folder: Path, sharpness: Sharpness) -> None:
    """Write a head's sharpness into its config.json, all or nothing."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text()) | {SHARPNESS: sharpness._asdict()}
    unfinished = file.with_suffix(".json.new")
    unfinished.write_text(json.dumps(config, indent=2) + "\n")
    unfinished.replace(file)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    found = argparse.ArgumentParser(
        prog="python -m build.heads.sharpness", description="Measure how sure a drafter may be, and record it."
    )
    add = found.add_argument
    add("folder", type=Path, help="of the head or the draft model; its config.json gets the key `sharpness`")
    add("--kind", choices=(*KINDS, DRAFT_MODEL), required=True)
    add("--target", default=str(MODELS / "target"), help="folder or hub id of the model that it drafts for")
    add("--corpus", default="", help="FILE.txt, FILE.jsonl or a folder (default: the Python standard library)")
    add("--out", type=Path, default=MODELS, help="folder whose .train keeps the corpus as tokens (default: models)")
    add("--windows", type=int, default=16, help="greedy continuations that are drafted along (default: %(default)s)")
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the figures and record nothing")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parser().parse_args(arguments)
    if not (options.folder / "config.json").is_file():
        raise BuildError(f"{options.folder} has no config.json; name the folder of a head or of a draft model")
    target = load_target(options.target, options.device, reads_layers=options.kind == "eagle3")
    text = heads_text(options.target, options.corpus, Workspace(options.out), options.out / ".train" / "heads")
    greedy = record_greedy(target, text.held_out, options.windows)
    if options.kind == DRAFT_MODEL:
        draft = load_target(str(options.folder), options.device, reads_layers=False)
        found = measure_draft_model(draft, target, greedy, text.held_out)
    else:
        device = torch.device(options.device)
        head = load_head(options.kind, str(options.folder), options.target, torch.float32, device)
        found = measure_sharpness(head, target, greedy, text.held_out)
    print(f"{options.folder}: sharpness {found.argmax:g} of guesses, {found.sampled:g} of sampled tokens", flush=True)
    if not options.dry_run:
        record(options.folder, found)


if __name__ == "__main__":
    run_command(main)
