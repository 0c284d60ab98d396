"""How much surer a head may be than its own probabilities say; measured for each head, and kept in its config.json."""

from __future__ import annotations

from typing import NamedTuple

#: The smallest sharpness allowed; 0 would be a division by zero.
LEAST = 0.01


class Sharpness(NamedTuple):
    """How q becomes the confidences by which trees grow; each in LEAST … 1, where 1 means q itself, as in the papers.

    argmax: the divisor of log q where the target takes an argmax. sampled: a token sampled from q is accepted with
    probability about 1 − sampled · (1 − q). `python -m build.heads.sharpness` measures both (docs/methods/eagle.md,
    Confidence).
    """

    argmax: float = 1.0
    sampled: float = 1.0
