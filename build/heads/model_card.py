"""The model cards of heads and the table of the ablation, written from provenance alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from build.heads.text import STANDARD_LIBRARY
from build.model_card import LICENCE, training_section

TITLES = {
    "medusa": "Medusa heads (arXiv:2401.10774)",
    "eagle": "EAGLE head (arXiv:2401.15077), for the methods eagle and eagle2",
    "eagle3": "EAGLE-3 head (arXiv:2503.01840)",
    "redrafter": "Recurrent drafter (arXiv:2403.09919)",
}
COMPARISON = "heads-ablation"


def head_card(provenance: dict[str, Any]) -> str:
    """Return the README.md of a head's folder."""
    name = provenance["head"]
    front = "---\nlibrary_name: safetensors\n---"
    licence = ""
    if provenance["corpus"]["source"].startswith(STANDARD_LIBRARY):
        front = "---\nlicense: psf-2.0\nlibrary_name: safetensors\n---"
        licence = f"## Licence of the training text\n\n{LICENCE}\n"
    use = (
        f"{TITLES.get(name, name)} for the model `{provenance['target']}` and no other: `target_fingerprint` in "
        "config.json names its weights. Tables that equal the target's are read from the target's folder."
    )
    return "\n".join([front, f"# {name}\n\n{use}\n", _training(provenance), _measured(provenance), licence])


def _training(provenance: dict[str, Any]) -> str:
    corpus, settings, part = provenance["corpus"], provenance["settings"], provenance["part"]
    state = "" if provenance["complete"] else " (interim: the run is not finished)"
    rows = {
        "script": f"`{provenance['script']}`{state}",
        "corpus": f"{corpus['source']}, {corpus['train_files']} documents ({corpus['held_out_files']} more held out), "
        f"SHA-256 of the list `{corpus['sha256']}`",
        "text": f"chat template: {'yes' if corpus['chat_template'] else 'no'}; put in front: "
        f"{' '.join(f'`{token}`' for token in corpus['special_tokens']) or 'nothing'}",
        "parameters": f"{provenance['parameters']:,}",
        "tokens": f"{provenance['tokens']:,}; {provenance['wall_minutes']} minutes together with "
        f"{', '.join(kind for kind in settings['kinds'] if kind != provenance['head']) or 'no other head'}",
        "loss": ", ".join(f"{key} {value}" for key, value in part.items()),
        "schedule": ", ".join(f"{key} {value}" for key, value in provenance["plan_followed"].items()),
        "optimizer": f"AdamW, weight decay {settings['weight_decay']}, gradient norm at most "
        f"{settings['max_grad_norm']}, seed {settings['seed']}, {settings['dtype']} products, "
        f"torch {provenance['torch']}",
    }
    return training_section(rows)


def _measured(provenance: dict[str, Any]) -> str:
    """Return accuracies by depth and acceptance lengths, on text and on the target's own continuations."""
    lines = ["## Measured on held-out files\n"]
    for where, found in provenance["measured"].items():
        keys = list(found["accuracy"][0])
        lines += [f"{where.capitalize()}, {found['places']:,} positions:\n"]
        lines += [f"| tokens after the root | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
        for depth, row in enumerate(found["accuracy"], start=1):
            lines.append(f"| {depth} | {' | '.join(f'{row[key]:.1%}' for key in keys)} |")
        lengths = ", ".join(f"{length:.2f} with a {tree}" for tree, length in found["acceptance_length"].items())
        lines += ["", f"Simulated tokens a step, the target's own included: {lengths}.\n"]
    sharpness = provenance["sharpness"]
    lines += [
        f"Sharpness, recorded in config.json: {sharpness['argmax']:g} of guesses, {sharpness['sampled']:g} of sampled "
        "tokens.\n"
    ]
    return "\n".join(lines)


def write_comparison(eagle: dict[str, Any], without: dict[str, Any], folder: Path) -> None:
    """Write the figures of EAGLE with and without the sampled token's embedding, as JSON and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"eagle": eagle, "eagle without the sampled token": without}
    (folder / f"{COMPARISON}.json").write_text(json.dumps(numbers, indent=2) + "\n")
    (folder / f"{COMPARISON}.md").write_text(_comparison_table(numbers))


def _comparison_table(numbers: dict[str, dict[str, Any]]) -> str:
    """Return a row for each head and kind of text."""
    first = next(iter(numbers.values()))
    measured = next(iter(first["measured"].values()))
    lengths = list(measured["acceptance_length"])
    columns = [*(f"top-1 at {depth}" for depth in range(1, len(measured["accuracy"]) + 1)), *lengths]
    state = "" if first["complete"] else " The run is not finished: these are interim numbers."
    lines = [
        "# EAGLE with and without the sampled token's embedding\n",
        "Made by `python -m build.heads --ablation`: the same "
        f"{first['tokens']:,} tokens of {first['corpus']['source']}, the same batches, noise and start for both; "
        "the second reads zeros instead of the embedding. *top-1 at j*: how often the head's best token j tokens after "
        "the root is right, given that all tokens before it are right. The last columns are simulated tokens a step, "
        f"the target's own included.{state}\n",
        f"| head | on | {' | '.join(columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name, provenance in numbers.items():
        for where, found in provenance["measured"].items():
            cells = [f"{row['top1']:.1%}" for row in found["accuracy"]]
            cells += [f"{found['acceptance_length'][key]:.2f}" for key in lengths]
            lines.append(f"| {name} | {where} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
