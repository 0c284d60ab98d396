"""What an engine that drafts by itself was built for: Medusa's and EAGLE's trees, Lookahead's sizes.

The builder, the server at load and every step check with these functions, so that their messages agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.core.errors import ConfigError, abbreviated

Path = Sequence[int]
#: TensorRT-LLM's own tree, mc_sim_7b_63: nodes, levels, most nodes of one level that have children
#: (cpp/tensorrt_llm/runtime/utils/speculativeChoicesUtils.h and eagleModule.cpp).
DEFAULT_NODES, DEFAULT_DEPTH, DEFAULT_NON_LEAVES = 63, 4, 10
#: Methods with a static tree, which may differ from the library's own.
TREES = ("medusa", "eagle")
MIN_SIZES, OFF = (2, 2, 1), (1, 1, 0)
#: With more requests in a pass, Lookahead stops drafting until a pass has no generating request
#: (DecodingConfig::getLookaheadDecodingMaxNumRequest).
LOOKAHEAD_REQUESTS = 8
WHERE = "key choices"


class TreeLimits(NamedTuple):
    """The limits of an engine's trees.

    nodes, depth, non_leaves: maximum nodes, levels, and nodes of one level that have children; 0 = no limit.
    is_exact: the tree must have `depth` levels, not fewer: EAGLE's network is unrolled that many times, and the library
    checks it in a pass, where the error ends every request in flight (createNewDecoderRequests.cpp, newRequestEagle).
    """

    nodes: int
    depth: int = 0
    non_leaves: int = 0
    is_exact: bool = False

    def refusal(self, paths: Sequence[Path]) -> str:
        """Return how a tree, given as the paths of all its nodes, breaks the limits, count first; empty if it fits."""
        levels: dict[int, set[tuple[int, ...]]] = {}
        for path in paths:
            levels.setdefault(len(path) - 1, set()).add(tuple(path[:-1]))
        widest = max((len(parents) for level, parents in levels.items() if level), default=0)
        depth = max(map(len, paths), default=0)
        if len(paths) > self.nodes:
            return f"{len(paths)} nodes, the engine was built for at most {self.nodes}"
        if self.depth and depth > self.depth:
            return f"{depth} levels, the engine was built for at most {self.depth}"
        if self.is_exact and depth != self.depth:
            return f"{depth} levels, the engine needs exactly {self.depth} (eagle_layers)"
        if self.non_leaves and widest > self.non_leaves:
            return f"{widest} nodes of one level with children, the engine was built for at most {self.non_leaves}"
        return ""


def tree_limits(method: str, max_draft_len: int, spec: Mapping[str, Any]) -> TreeLimits:
    """Return the limits of an engine's trees; spec: the EngineSpec in its plan."""
    if method == "eagle":
        layers, non_leaves = spec.get("eagle_layers", 0), spec.get("eagle_non_leaves", 0)
        return TreeLimits(max_draft_len, layers, non_leaves, is_exact=layers > 0)
    return TreeLimits(max_draft_len, spec.get("medusa_heads", 0))


def read_tree(text: str) -> list[list[int]]:
    """Return the nodes in the key choices, which is JSON with a path of child numbers for each; raises ConfigError."""
    try:
        paths = json.loads(text) if text else []
    except ValueError as error:
        raise ConfigError(f"choices is not JSON: {error} ({WHERE})") from None
    lists = isinstance(paths, list) and all(isinstance(path, list) and path for path in paths)
    if not lists or not all(type(rank) is int and rank >= 0 for path in paths for rank in path):
        raise ConfigError(
            "choices must be a list of paths of child numbers, like [[0], [0, 0], [1]], "
            f"got {abbreviated(paths)} ({WHERE})"
        )
    nodes = [tuple(path) for path in paths]
    if len(set(nodes)) < len(nodes):
        raise ConfigError(f"choices must name different nodes ({WHERE})")
    if orphan := next((node for node in nodes if node[:-1] and node[:-1] not in nodes), None):
        raise ConfigError(
            f"choices names the node {list(orphan)}, but not its parent: every node must be listed ({WHERE})"
        )
    return [list(path) for path in paths]


def check_tree(method: str, paths: Sequence[Path], max_draft_len: int, spec: Mapping[str, Any]) -> None:
    """Raise ConfigError if an engine cannot draft with this tree; [] = the library's own tree.

    Invariant: the tree has as many nodes as the engine takes draft tokens.
    """
    if method not in TREES:
        if paths:
            raise ConfigError(f"choices must be empty for method {method}: {' and '.join(TREES)} have one ({WHERE})")
        return
    if not paths and max_draft_len != DEFAULT_NODES:
        raise ConfigError(
            f"choices is missing: TensorRT-LLM's own tree has {DEFAULT_NODES} nodes, and draft_len is {max_draft_len} "
            f"(name the nodes of a tree in the {WHERE} of the engines' file, or use draft_len {DEFAULT_NODES})"
        )
    if not paths:
        _check_default_tree(tree_limits(method, max_draft_len, spec), method)
        return
    if len(paths) != max_draft_len:
        raise ConfigError(f"choices must have draft_len {max_draft_len} nodes, got {len(paths)} ({WHERE})")
    if refusal := tree_limits(method, max_draft_len, spec).refusal(paths):
        raise ConfigError(f"choices has {refusal} ({WHERE})")


def _check_default_tree(limits: TreeLimits, method: str) -> None:
    """Raise ConfigError if an engine cannot draft with the library's own tree."""
    fits = limits.depth == DEFAULT_DEPTH if limits.is_exact else not limits.depth or limits.depth >= DEFAULT_DEPTH
    if not fits or 0 < limits.non_leaves < DEFAULT_NON_LEAVES:
        needed = f"eagle_layers {DEFAULT_DEPTH} and eagle_non_leaves {DEFAULT_NON_LEAVES}"
        raise ConfigError(
            f"choices is missing: TensorRT-LLM's own tree has {DEFAULT_DEPTH} levels with up to {DEFAULT_NON_LEAVES} "
            f"nodes that have children, and needs {needed if method == 'eagle' else f'medusa_heads {DEFAULT_DEPTH}'} "
            f"at least (name the nodes of another tree in the {WHERE} of the engines' file)"
        )


def lookahead_nodes(window: int, ngram: int, guesses: int) -> int:
    """Return the number of draft tokens of one Lookahead pass: (N == 1 ? 0 : N - 2) + (W - 1 + G)(N - 1)."""
    return max(ngram - 2, 0) + (window - 1 + guesses) * (ngram - 1)


def sizes_refusal(sizes: tuple[int, ...], most: tuple[int, ...]) -> str:
    """Return why a request cannot have these Lookahead sizes (window, n-gram, guesses); empty if it can."""
    fits = all(least <= size <= end for least, size, end in zip(MIN_SIZES, sizes, most, strict=True))
    if fits or sizes == OFF:
        return ""
    return (
        f"window, ngram and guesses must be in {_shown(MIN_SIZES)} to {_shown(most)}, for which the engine was "
        f"built, or {_shown(OFF)}, off; got {_shown(sizes)} (input speculation_config)"
    )


def _shown(sizes: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, sizes))})"
