"""The experiments: which settings each of them runs, and what its paper reports."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.core.methods import METHODS, names_in
from orchestrator.core.static_trees import EAGLE_LEAVES

PLAIN = "none"


@dataclass(frozen=True)
class Setting:
    """A method with its parameters at a temperature, under an acceptance rule."""

    label: str
    method: str
    parameters: str = "{}"
    temperature: float = 0.0
    rule: str = "coupled"

    @property
    def name(self) -> str:
        """Its name in tables and files, unique within the run."""
        rule = f", {self.rule}" if self.temperature and self.method != PLAIN else ""
        return f"{self.label}, T = {self.temperature:g}{rule}"

    @property
    def base(self) -> Setting:
        """Plain decoding at the same temperature, which it is compared with."""
        return Setting(PLAIN, PLAIN, temperature=self.temperature)

    @property
    def drafters(self) -> set[str]:
        """The drafters that it needs."""
        return {METHODS[name].drafter for name in names_in(self.method)} - {""}


class Published(NamedTuple):
    """A figure of a paper, as it is printed there."""

    what: str
    figure: str
    source: str


@dataclass(frozen=True)
class Experiment:
    """One paper's experiment. why: why our figures differ from the paper's. by_turn: add a table by task and turn."""

    name: str
    title: str
    settings: tuple[Setting, ...]
    published: tuple[Published, ...]
    why: str
    by_turn: bool = False


def setting(label: str, method: str, temperature: float = 0.0, rule: str = "", **parameters: Any) -> Setting:
    """Return a setting; the default rule is rejection, or coupled at temperature 0, where all lossless rules agree."""
    chosen = rule or ("rejection" if temperature else "coupled")
    return Setting(label, method, json.dumps(parameters), temperature, chosen)


def _leviathan() -> Iterator[Setting]:
    for temperature in (0.0, 1.0):
        for order, name in ((1, "unigram"), (2, "bigram"), (4, "4-gram")):
            yield setting(name, "ngram", temperature, order=order, draft_len=3)
        yield setting("draft model", "draft_model", temperature, draft_len=5, min_prob=0.0)
        for method in ("medusa", "eagle"):
            yield setting(f"{method}, chain", method, temperature, choices=[[0, 0, 0, 0]], min_prob=0.0)
        yield setting("eagle3, chain", "eagle3", temperature, top_k=1, depth=4, min_prob=0.0)
        yield setting("redrafter, one beam", "redrafter", temperature, beams=1, beam_len=4, min_prob=0.0)


def _eagle() -> Iterator[Setting]:
    for temperature in (0.0, 1.0):
        for rule in ("coupled", "rejection") if temperature else ("coupled",):
            yield setting("eagle, chain of 5", "eagle", temperature, rule, choices=[[0] * 5], min_prob=0.0)
            leaves = [list(leaf) for leaf in EAGLE_LEAVES]
            yield setting("eagle, published tree", "eagle", temperature, rule, choices=leaves, min_prob=0.0)
            yield setting("eagle2", "eagle2", temperature, rule)
            yield setting("eagle3", "eagle3", temperature, rule)


def _sampled() -> Iterator[Setting]:
    heads = ("medusa", "eagle", "eagle2", "eagle3", "redrafter")
    for method in heads:
        for label, draws in (("sampled", True), ("chosen", False)):
            yield setting(f"{method}, {label}", method, 1.0, draws=draws)
            yield setting(f"{method}, {label}, 8 nodes", method, 1.0, draws=draws, max_nodes=8, min_prob=0.0)
    for method in ("draft_model", *heads[1:]):
        for temperature in (0.5, 0.8, 1.25):
            yield setting(f"{method}, q at T = {temperature:g}", method, 1.0, draft_temperature=temperature)
        yield setting(f"{method}, q of 8 tokens", method, 1.0, draft_top_k=8)
        yield setting(f"{method}, q of mass 0.9", method, 1.0, draft_top_p=0.9)


EXPERIMENTS = (
    Experiment(
        "leviathan",
        "α, γ* and the walltime gain (Leviathan et al. 2023)",
        tuple(_leviathan()),
        (
            Published("α of a unigram", "0.03–0.13", "arXiv:2211.17192, table 3"),
            Published("α of a bigram", "0.05–0.23", "arXiv:2211.17192, table 3"),
            Published("T5-small for T5-XXL, English–German, T = 0", "α 0.75, γ 7, 3.4 ×", "arXiv:2211.17192, table 2"),
            Published("the same at T = 1", "α 0.62, γ 7, 2.6 ×", "arXiv:2211.17192, table 2"),
        ),
        "Their gain takes a pass over γ + 1 tokens to cost what a plain pass costs, which is nearly true on a TPU with "
        "an 11B model and false here: on two CPU cores each row costs about a fifth of a plain pass, so the measured "
        "speed-up stays far below the predicted one. Our target repeats itself at T = 0, which raises every α there.",
    ),
    Experiment(
        "prompt_lookup",
        "Prompt lookup by task and turn (Saxena 2023)",
        (
            setting("as posted", "prompt_lookup", match="leftmost", clip="skip", length="fixed", draft_len=10),
            setting("as in transformers", "prompt_lookup", match="leftmost", clip=True, length="fixed", draft_len=10),
            setting("our default", "prompt_lookup"),
            setting("suffix", "suffix"),
            setting("recycling", "recycling"),
        ),
        (
            Published("summarisation and questions about a context, Mistral-7B, A100", "2.4 ×", "the author's post"),
            Published("prompts slower than greedy", "none", "the author's post"),
            Published("Spec-Bench, Vicuna-7B, A100", "1.66 × (1.75 tokens a step)", "Spec-Bench leaderboard"),
            Published("Token Recycling, the same", "2.22 × (2.73 tokens a step)", "Spec-Bench leaderboard"),
        ),
        "A refused draft of ten tokens costs a GPU next to nothing and a CPU two plain passes, so some prompts are "
        "slower than plain decoding here. The acceptance length does not depend on the machine, but on the text: ours "
        "is source code by a small model that repeats itself.",
        by_turn=True,
    ),
    Experiment(
        "eagle",
        "EAGLE: chains and trees, T = 0 and T = 1 (Li et al. 2024)",
        tuple(_eagle()),
        (
            Published("EAGLE, Vicuna-13B, MT-bench, T = 0", "3.07 ×, τ 3.98", "arXiv:2401.15077"),
            Published("EAGLE-2, the same", "4.26 ×, τ 4.83", "arXiv:2406.16858"),
            Published("EAGLE-3, the same", "5.58 ×, τ 6.65", "arXiv:2503.01840"),
        ),
        "Trees of 25 to 60 nodes are nearly free on a GPU, which reads the weights once for all rows. Under "
        "`rejection` at T = 1 all trees are sampled from q. With and without the sampled token: "
        "[heads-ablation](heads-ablation.md), from training.",
    ),
    Experiment(
        "sampled",
        "Drafts that are sampled from q, chosen by it, and sampled from another q, at T = 1 under rejection",
        tuple(_sampled()),
        (),
        "No paper compares these. Each tree is measured with 8 nodes, whatever they cost, beside the default, which "
        "drafts only what seems likely enough.",
    ),
    Experiment(
        "medusa",
        "Medusa's tree sizes (Cai et al. 2024)",
        tuple(
            setting(f"{size} node{'' if size == 1 else 's'}", "medusa", max_nodes=size, min_prob=0.0)
            for size in (1, 2, 4, 8, 16, 32, 63)
        ),
        (
            Published("Medusa-1, Vicuna-7B, 63 nodes", "2.18 ×", "arXiv:2401.10774"),
            Published("Vicuna-7B, Spec-Bench, A100", "1.71 × (2.31 tokens a step)", "Spec-Bench leaderboard"),
        ),
        "The paper's curve rises until the GPU is busy, at about 64 nodes. Here the first node already costs a fifth "
        "of a pass, so the best tree is tiny while the tokens a step rise as in the paper.",
    ),
    Experiment(
        "lookahead",
        "Lookahead's W, N and G (Fu et al. 2024)",
        tuple(
            setting(f"W {w}, N {n}, G {g}{', random fill' if fill == 'random' else ''}", "lookahead",
                    window=w, ngram=n, guesses=g, fill=fill)
            for w, n, g, fill in (
                (3, 3, 3, "prompt"), (5, 4, 5, "prompt"), (5, 4, 5, "random"), (7, 5, 7, "prompt"),
                (15, 5, 15, "prompt"),
            )
        ),
        (
            Published("7B, MT-bench, 15/5/15", "up to 1.8 ×", "arXiv:2402.02057"),
            Published("Vicuna-7B, Spec-Bench, 5/7/7, A100", "1.34 × (1.64 tokens a step)", "Spec-Bench leaderboard"),
        ),
        "Lookahead buys fewer steps with many more rows (121 at 15/5/15), which only idle arithmetic pays for.",
    ),
    Experiment(
        "jacobi",
        "Jacobi's passes (Santilli et al. 2023)",
        tuple(
            setting(f"{size} unknown{'' if size == 1 else 's'}", "jacobi", draft_len=size) for size in (1, 3, 5, 8, 16)
        ),
        (Published("passes for m tokens", "at most m", "arXiv:2305.10427"),),
        "Their targets are encoder-decoder models that translate, whose next words depend less on the last ones than "
        "source code does.",
    ),
)  # fmt: skip


def settings_of(experiments: Collection[Experiment], drafters: Collection[str]) -> list[Setting]:
    """Return the settings that a server with these drafters supports, plain decoding at each temperature first."""
    all_settings = [each for experiment in experiments for each in experiment.settings]
    supported = [each for each in all_settings if each.drafters <= set(drafters)]
    return list(dict.fromkeys([*(each.base for each in supported), *supported]))
