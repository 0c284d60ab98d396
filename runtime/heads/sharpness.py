"""How much surer a head may be than its own probabilities: measured for each head, recorded in its config.json."""

from __future__ import annotations

from typing import NamedTuple

#: The least sharpness; 0 would divide by zero.
LEAST = 0.01


class Sharpness(NamedTuple):
    """What turns q into the confidence by which trees grow, each in LEAST … 1; 1 is q itself, as in the papers.

    argmax: where the target takes an argmax, log q is divided by it. sampled: a token sampled from q is accepted with
    about 1 − sampled · (1 − q). `python -m build.heads.sharpness` finds both (docs/methods/eagle.md, Confidence).
    """

    argmax: float = 1.0
    sampled: float = 1.0
