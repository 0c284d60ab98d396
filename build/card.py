"""The model card, written from provenance alone; it knows nothing that provenance.json does not hold."""

from typing import Any

LICENCE = """\
The training text is the source of the Python standard library, Copyright (c) 2001-2023 Python Software
Foundation; All Rights Reserved, used under the PSF License Agreement (https://docs.python.org/3/license.html);
some files of it carry further notices of their authors. The weights may reproduce passages of that text."""

USE = """\
A small language model of Python source for demonstrations and tests of speculative decoding. It writes
plausible lines, not working programs; its vocabulary has 4,096 byte-level tokens and its context 2,048."""


def model_card(provenance: dict[str, Any]) -> str:
    """The README.md of a model folder, in Markdown."""
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
    """What was trained, on what, for how long."""
    corpus, recipe, plan = provenance["corpus"], provenance["recipe"], provenance["plan_followed"]
    state = "" if provenance["complete"] else " (interim: the run is not finished)"
    rows = {
        "script": f"`{provenance['script']}`{state}",
        "corpus": f"{corpus['source']}, {corpus['interpreter']}, {corpus['train_files']} files "
        f"({corpus['held_out_files']} more held out), SHA-256 of the file list `{corpus['sha256']}`",
        "shape": ", ".join(f"{key} {value}" for key, value in recipe["shape"].items()),
        "tokens": f"{provenance['tokens']:,} in {provenance['wall_minutes']} minutes",
        "schedule": ", ".join(f"{key} {value}" for key, value in plan.items()),
        "optimizer": f"AdamW, weight decay {recipe['weight_decay']}, gradient norm at most {recipe['max_grad_norm']}, "
        f"seed {recipe['seed']}, bfloat16 autocast, torch {provenance['torch']}",
    }
    if recipe["teacher_weight"]:
        rows["distilled from"] = f"{recipe['teacher']}, with weight {recipe['teacher_weight']}"
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    return "\n".join(["## Training\n", "| | |", "|---|---|", *lines, ""])


def _losses(provenance: dict[str, Any]) -> str:
    """Losses in nats per token, in all and per band of positions, and the agreement with a teacher."""
    bands = list(provenance["held_out_loss"]["bands"])
    rows = [
        _loss_row("training text (a sample)", provenance["train_loss"]),
        _loss_row("held-out text", provenance["held_out_loss"]),
    ]
    lines = [f"| nats per token | all | {' | '.join(bands)} |", "|---" * (len(bands) + 2) + "|", *rows, ""]
    if "agreement" in provenance:
        agreed = provenance["agreement"]
        lines.append(
            f"Against the {agreed['with']} on held-out text: same most likely token at {agreed['greedy']:.1%} of the "
            f"positions, mean overlap sum(min(p, q)) {agreed['overlap']:.1%}.\n"
        )
    return "\n".join(["## Losses by position in the context\n", *lines])


def _loss_row(title: str, loss: dict[str, Any]) -> str:
    values = [loss["mean"], *loss["bands"].values()]
    return f"| {title} | {' | '.join(f'{value:.3f}' for value in values)} |"
