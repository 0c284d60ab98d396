"""`python -m tests.laws`: the laws of the rules as served, and `coupled` beside the reference, at full size.

A million draws for every setting, a million tokens of table models; the tables become docs/figures/laws.md. Five
minutes on one core. The unit tests hold the same to it, three of the settings in the same number.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.pathwise import Found, compare
from tests.support.rule_laws import SETTINGS, Distance, Grown, Setting, emitted, golden, mixed

PAGE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "laws.md"
NUM_TOKENS = 3


def measured(setting: Setting, num_draws: int) -> tuple[Distance, Distance, float]:
    """Return how far the first token and three tokens are from their laws, and how often depth 1 is accepted."""
    first, acceptance = emitted(setting.single, golden(), 1, num_draws)
    joint, _ = emitted(setting, mixed(), NUM_TOKENS, num_draws)
    laws = golden().law(1), mixed().law(NUM_TOKENS)
    return Distance.between(first, laws[0]), Distance.between(joint, laws[1]), acceptance


def row(setting: Setting, first: Distance, joint: Distance, acceptance: float) -> str:
    """Return a row of the table."""
    cells = [
        f"`{setting.rule}`",
        f"{'sampled' if setting.sampled else 'deterministic'}, "
        + (f"grown to {setting.max_nodes}" if isinstance(setting, Grown) else " × ".join(map(str, setting.branching))),
        *(f"{each.variation:.5f} | {each.floor:.5f} | {each.p_value:.2f}" for each in (first, joint)),
        f"{acceptance:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def page(rows: Sequence[str], num_draws: int, found: Found) -> str:
    """Return docs/figures/laws.md."""
    return f"""# Laws over seeds

Made by `python -m tests.laws` ({time.strftime("%Y-%m-%d", time.gmtime())}, CPU, float64): {num_draws:,} seeds for every \
row and law. TV: total variation from the target's law. Floor: what chance alone makes of it at this number of draws. \
p: chi-square test. Drafts: children by depth. First token: the pair of distributions of 8 tokens where rejection \
accepts 0.5 and the coupling 0.4246; three tokens: a language of 5 tokens, several steps, 125 sequences. Grown trees \
are sampled by a recurrent head with random weights and its own q, in native code, whatever the language.

| rule | drafts | first token: TV | floor | p | three tokens: TV | floor | p | accepted at depth 1 |
|---|---|---:|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

Under `coupled`, table models of 2 to 32 tokens, eight samplings, trees of every kind: {found.texts:,} texts, \
{found.tokens:,} tokens in {found.steps:,} steps, {found.nodes:,} draft nodes, {found.accepted:,} of them accepted. \
**Tokens that are not the reference's: {found.wrong_tokens}; steps that the numpy reference decides otherwise: \
{found.wrong_paths}.**
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the page; return 1 when anything is off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.disable()  # nothing here is in a cycle
    rows, is_sound = [], True
    for setting in SETTINGS:
        first, joint, acceptance = measured(setting, options.draws)
        is_sound &= first.is_chance and joint.is_chance
        rows.append(row(setting, first, joint, acceptance))
        print(rows[-1], flush=True)
    found = compare(options.tokens)
    options.page.write_text(page(rows, options.draws, found), encoding="utf-8")
    return int(not is_sound or bool(found.wrong_tokens or found.wrong_paths))


if __name__ == "__main__":
    sys.exit(main())
