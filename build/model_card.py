"""The model card of the target or the draft model, written from provenance.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LICENCE = """\
The training text is the source of the Python standard library, Copyright (c) 2001-2023 Python Software
Foundation; All Rights Reserved, used under the PSF License Agreement (https://docs.python.org/3/license.html);
some files of it carry further notices of their authors. The weights may reproduce passages of that text."""

USE = """\
A small language model of Python source for demonstrations and tests of speculative decoding. It writes
plausible lines, not working programs; its vocabulary has 4,096 byte-level tokens and its context 2,048."""


def model_card(provenance: dict[str, Any]) -> str:
    """Return the README.md of a model folder."""
    return "\n".join(
        [
            "---\nlicense: psf-2.0\nlibrary_name: transformers\npipeline_tag: text-generation\n---",
            f"# {provenance['recipe']['name']}\n\n{USE}\n",
            _training(provenance),
            _losses(provenance),
            f"## Licence of the training text\n\n{LICENCE}\n",
        ]
    )


def _training(provenance: dict[str, Any]) -> str:
    corpus, recipe, plan = provenance["corpus"], provenance["recipe"], provenance["plan_followed"]
    state = "" if provenance["complete"] else " (interim: the run is not finished)"
    rows = {
        "script": f"`{provenance['script']}`{state}",
        "corpus": f"{corpus['source']}, {corpus['interpreter']}, {corpus['train_files']} files "
        f"({corpus['held_out_files']} more held out), SHA-256 of the file list `{corpus['sha256']}`",
        "shape": ", ".join(f"{key} {value}" for key, value in recipe["shape"].items()),
        "tokens": f"{provenance['tokens']:,} in {provenance['wall_minutes']} minutes",
        "schedule": ", ".join(f"{key} {value}" for key, value in plan.items()),
        "optimizer": f"{recipe['optimizer']}, weight decay {recipe['weight_decay']}, "
        f"gradient norm at most {recipe['max_grad_norm']}, seed {recipe['seed']}, bfloat16 autocast, "
        f"torch {provenance['torch']}",
    }
    if recipe["teacher_weight"]:
        rows["distilled from"] = f"{recipe['teacher']}, with weight {recipe['teacher_weight']}"
    return training_section(rows)


def training_section(rows: Mapping[str, str]) -> str:
    """Return the section of a card that says how the model was trained, a table of two columns."""
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    return "\n".join(["## Training\n", "| | |", "|---|---|", *lines, ""])


def _losses(provenance: dict[str, Any]) -> str:
    """Return losses over all positions and by band of positions, and the agreement with the teacher."""
    bands = list(provenance["held_out_loss"]["bands"])
    lines = [f"| nats per token | all | {' | '.join(bands)} |", "|---" * (len(bands) + 2) + "|"]
    for title, key in (("training text (a sample)", "train_loss"), ("held-out text", "held_out_loss")):
        values = [provenance[key]["mean"], *provenance[key]["bands"].values()]
        lines.append(f"| {title} | {' | '.join(f'{value:.3f}' for value in values)} |")
    lines.append("")
    if "agreement" in provenance:
        agreed = provenance["agreement"]
        lines.append(
            f"Against the {agreed['with']} on held-out text: same most likely token at {agreed['greedy']:.1%} of the "
            f"positions, mean overlap sum(min(p, q)) {agreed['overlap']:.1%}.\n"
        )
    return "\n".join(["## Losses by position in the context\n", *lines])
