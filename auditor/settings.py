"""The settings of each drafting method under which texts are compared: three of each method, two of a union."""

from __future__ import annotations

import json
from typing import Any

#: name of a setting → (method, its parameters).
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "auto": ("auto", {}),
    "auto chain": ("auto", {"tree": False}),
    "auto 4": ("auto", {"max_nodes": 4}),
    "prompt_lookup": ("prompt_lookup", {}),
    "prompt_lookup branches": ("prompt_lookup", {"match": "frequent", "branches": 3, "draft_len": 6}),
    "prompt_lookup posted": (
        "prompt_lookup",
        {"match": "leftmost", "clip": "skip", "length": "fixed", "draft_len": 10},
    ),
    "ngram": ("ngram", {}),
    "ngram 1": ("ngram", {"order": 1, "draft_len": 1}),
    "ngram 2": ("ngram", {"order": 2, "draft_len": 8}),
    "suffix": ("suffix", {}),
    "suffix chain": ("suffix", {"tree": False, "max_depth": 4, "factor": 4.0}),
    "suffix wide": ("suffix", {"tree": True, "min_prob": 0.01, "factor": 2.0, "max_nodes": 32}),
    "lookahead": ("lookahead", {}),
    "lookahead 2 3 2": ("lookahead", {"window": 2, "ngram": 3, "guesses": 2, "fill": "random"}),
    "lookahead 7 5 7": ("lookahead", {"window": 7, "ngram": 5, "guesses": 7}),
    "jacobi": ("jacobi", {}),
    "jacobi 1": ("jacobi", {"draft_len": 1, "fill": "random"}),
    "jacobi 8": ("jacobi", {"draft_len": 8}),
    "recycling": ("recycling", {}),
    "recycling chain": ("recycling", {"choices": [[0, 0, 0, 0]], "from_prompt": False}),
    "recycling published": ("recycling", {"max_nodes": 80}),
    "predicted": ("predicted", {}),
    "predicted 3": ("predicted", {"draft_len": 3, "max_ngram": 2}),
    "predicted 64": ("predicted", {"draft_len": 64, "max_ngram": 8}),
    "draft_model 1": ("draft_model", {"draft_len": 1}),
    "draft_model 4": ("draft_model", {"draft_len": 4}),
    "draft_model 8": ("draft_model", {"draft_len": 8}),
    "draft_model tree": ("draft_model", {"draft_len": 4, "top_k": 3, "max_nodes": 12}),
    "medusa": ("medusa", {}),
    "medusa leaves": ("medusa", {"choices": [[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]}),
    "medusa chain": ("medusa", {"choices": [[0, 0, 0]]}),
    "eagle": ("eagle", {}),
    "eagle narrow": ("eagle", {"choices": [[0, 0, 0], [0, 1], [1]]}),
    "eagle chain": ("eagle", {"choices": [[0, 0, 0, 0]]}),
    "eagle2": ("eagle2", {}),
    "eagle2 small": ("eagle2", {"top_k": 3, "depth": 3, "max_nodes": 8}),
    "eagle2 wide": ("eagle2", {"top_k": 10, "depth": 6, "max_nodes": 40}),
    "eagle3": ("eagle3", {}),
    "eagle3 small": ("eagle3", {"top_k": 3, "depth": 3, "max_nodes": 8}),
    "eagle3 wide": ("eagle3", {"top_k": 10, "depth": 6, "max_nodes": 40}),
    "redrafter": ("redrafter", {}),
    "redrafter 2 3": ("redrafter", {"beams": 2, "beam_len": 3}),
    "redrafter 8 4": ("redrafter", {"beams": 8, "beam_len": 4}),
    "prompt_lookup+eagle2": ("prompt_lookup+eagle2", {}),
    "prompt_lookup+eagle2 8": ("prompt_lookup+eagle2", {"max_nodes": 8, "eagle2": {"top_k": 3}}),
    "suffix+recycling": ("suffix+recycling", {}),
    "suffix+recycling 9": ("suffix+recycling", {"max_nodes": 9, "recycling": {"choices": [[0], [1], [0, 0]]}}),
    "medusa+eagle3": ("medusa+eagle3", {}),
    "medusa+eagle3 40": ("medusa+eagle3", {"max_nodes": 40, "medusa": {"max_nodes": 12}}),
}


def inputs_of(setting: str, prompt: str) -> dict[str, Any]:
    """Return a request's inputs for a setting; `predicted` predicts a repetition of the prompt."""
    method, parameters = SETTINGS[setting]
    inputs: dict[str, Any] = {"speculation": method}
    if parameters:
        inputs["speculation_config"] = json.dumps(parameters)
    return inputs | ({"draft_text": prompt} if method == "predicted" else {})
