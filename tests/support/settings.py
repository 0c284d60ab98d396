"""The drafting methods at the settings under which the exactness law is tested: three of each."""

from __future__ import annotations

import json
from typing import Any

#: name of a setting → (method, its parameters).
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "prompt_lookup": ("prompt_lookup", {}),
    "prompt_lookup branches": ("prompt_lookup", {"match": "frequent", "branches": 3, "draft_len": 6}),
    "prompt_lookup grown": ("prompt_lookup", {"length": "grown", "max_ngram": 6, "draft_len": 24, "clip": True}),
    "ngram": ("ngram", {}),
    "ngram 1": ("ngram", {"order": 1, "draft_len": 1}),
    "ngram 2": ("ngram", {"order": 2, "draft_len": 8}),
    "suffix": ("suffix", {}),
    "suffix chain": ("suffix", {"tree": False, "max_depth": 4, "factor": 4.0}),
    "suffix wide": ("suffix", {"tree": True, "min_prob": 0.01, "factor": 2.0, "max_nodes": 32}),
    "lookahead": ("lookahead", {}),
    "lookahead 2 3 2": ("lookahead", {"window": 2, "ngram": 3, "guesses": 2}),
    "lookahead 7 5 7": ("lookahead", {"window": 7, "ngram": 5, "guesses": 7}),
    "jacobi": ("jacobi", {}),
    "jacobi 1": ("jacobi", {"draft_len": 1}),
    "jacobi 8": ("jacobi", {"draft_len": 8}),
    "predicted": ("predicted", {}),
    "predicted 3": ("predicted", {"draft_len": 3, "max_ngram": 2}),
    "predicted 64": ("predicted", {"draft_len": 64, "max_ngram": 8}),
    "draft_model 1": ("draft_model", {"draft_len": 1}),
    "draft_model 4": ("draft_model", {"draft_len": 4}),
    "draft_model 8": ("draft_model", {"draft_len": 8}),
}


def inputs_of(setting: str, prompt: str) -> dict[str, Any]:
    """Return a request's inputs for a setting; what is predicted is the prompt over again."""
    method, parameters = SETTINGS[setting]
    inputs: dict[str, Any] = {"speculation": method}
    if parameters:
        inputs["speculation_config"] = json.dumps(parameters)
    return inputs | ({"draft_text": prompt} if method == "predicted" else {})
