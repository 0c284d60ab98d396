"""Measures the heads of a run and publishes each as a folder, all or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from build.errors import BuildError
from build.heads.layout import layout_of
from build.heads.measure import Recorded, measure, record_greedy, record_text
from build.heads.model_card import head_card, write_comparison
from build.heads.settings import ABLATED, Settings
from build.heads.sharpness import measure_sharpness
from build.heads.target import FrozenTarget
from build.heads.text import HeadsText
from build.heads.train import HeadsRun
from build.recipe import Plan
from build.workspace import publish_folder
from runtime.models.heads.checkpoint.checks import ACCURACY, FINGERPRINT, SHARPNESS

MEASURED_WINDOWS = 48
#: Heads whose static trees are built from their own accuracy, and the text it is measured on, as drafted in service.
STATIC, SERVED_ON = ("medusa", "eagle"), "greedy continuation"


def publish(run: HeadsRun, text: HeadsText, out: Path, scratch: Path, figures: Path) -> None:
    """Write OUT/<kind> for each head; the ablated one stays in the scratch folder and its figures go to `figures`."""
    recorded = {
        "held-out text": record_text(run.target, text.held_out, MEASURED_WINDOWS),
        SERVED_ON: record_greedy(run.target, text.held_out, MEASURED_WINDOWS),
    }
    provenances = {name: _provenance(name, run, text, recorded) for name in run.heads}
    for name, provenance in provenances.items():
        folder = (scratch if name == ABLATED else out) / name
        publish_folder(_write_head(name, run, provenance, scratch / "export"), folder)
        lengths = ", ".join(
            f"{where} {length:.2f} tokens a step ({tree})"
            for where, found in provenance["measured"].items()
            for tree, length in found["acceptance_length"].items()
        )
        print(f"{name}: wrote {folder.parent.name}/{name}: {lengths}", flush=True)
    if ABLATED in provenances and "eagle" in provenances:
        write_comparison(provenances["eagle"], provenances[ABLATED], figures)


def check_free(out: Path, kinds: Iterable[str], target: FrozenTarget) -> None:
    """Refuse to replace another target's heads; raises BuildError that names the folder."""
    for kind in kinds:
        config = out / kind / "config.json"
        owner = json.loads(config.read_text()).get(FINGERPRINT) if config.exists() else target.identity
        if owner != target.identity:
            raise BuildError(f"{out / kind} holds a head of another target; delete it or name another folder (--out)")


def is_published(out: Path, settings: Settings, target: FrozenTarget) -> bool:
    """Return whether every head's folder holds the finished result of these settings for this target."""
    return all(_is_result(out / kind / "provenance.json", kind, settings, target) for kind in settings.kinds)


def _is_result(file: Path, kind: str, settings: Settings, target: FrozenTarget) -> bool:
    found = json.loads(file.read_text()) if file.exists() else {}
    same = (found.get("part"), found.get("target_fingerprint")) == (asdict(settings.part(kind)), target.identity)
    plan = Plan(**found["plan_followed"]) if found else settings.plan
    wanted = replace(settings.plan, cut_step=plan.cut_step)
    if plan.is_shortened:
        wanted = replace(wanted, tokens=plan.tokens, is_shortened=True)
    return bool(same and found["complete"] and plan == wanted)


def _provenance(name: str, run: HeadsRun, text: HeadsText, recorded: Mapping[str, Recorded]) -> dict[str, Any]:
    """Return how a head was trained and how good it is: enough to train it again."""
    settings, progress, head = run.settings, run.progress, as_published(run.heads[name])
    return {
        "script": "python -m build.heads",
        "head": name,
        **progress.provenance,
        "target": run.target.title,
        "target_fingerprint": run.target.identity,
        "corpus": heads_corpus(text),
        "settings": {key: value for key, value in asdict(settings).items() if key not in ("plan", "parts")},
        "part": asdict(settings.part(name)),
        "parameters": sum(parameter.numel() for parameter in run.heads[name].parameters()),
        "losses": {key: round(value, 4) for key, value in progress.losses.items() if key == name},
        "measured": {key: measure(head, found) for key, found in recorded.items()},
        SHARPNESS: measure_sharpness(head, run.target, recorded[SERVED_ON], text.held_out)._asdict(),
    }


def heads_corpus(text: HeadsText) -> dict[str, Any]:
    """Return the provenance of the corpus, and how it was written for the target."""
    return {
        "source": text.corpus.origin,
        **text.corpus.provenance,
        "chat_template": text.chat_template,
        "special_tokens": list(text.special_tokens),
    }


def as_published(head: nn.Module) -> nn.Module:
    """Return a copy of the head with its parameters rounded to bfloat16, as they are published."""
    copied = deepcopy(head).eval().requires_grad_(False)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return copied


def _write_head(name: str, run: HeadsRun, provenance: dict[str, Any], folder: Path) -> Path:
    """Write the head's files into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    layout = layout_of(name, run.heads[name], run.target, run.settings)
    save_file(dict(layout.tensors), folder / layout.file, metadata={"format": "pt"})
    (folder / layout.file).chmod(0o644)  # safetensors makes its files readable by the owner alone
    hits = provenance["measured"][SERVED_ON]["hits"]
    config = {**layout.config, SHARPNESS: provenance[SHARPNESS], **({ACCURACY: hits} if name in STATIC else {})}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    (folder / "README.md").write_text(head_card(provenance))
    return folder
