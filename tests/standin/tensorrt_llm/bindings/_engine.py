"""NOT TensorRT-LLM: an "engine" whose rank file names a checkpoint, its limits, and what it refuses to run."""

import collections
import functools
import json
import logging
from pathlib import Path

import numpy as np
import torch
from tensorrt_llm.bindings._configs import DecodingMode, check

log = logging.getLogger(__name__)

EXTERNAL, LOOKAHEAD = "draft_tokens_external", "lookahead_decoding"
MODES = {
    "medusa": DecodingMode.Medusa(),
    LOOKAHEAD: DecodingMode.Lookahead(),
    "explicit_draft_tokens": DecodingMode.ExplicitDraftTokens(),
    "eagle": DecodingMode.Eagle(),
}
NUM_GUESSED = 4
LOGITS = torch.float32  # --logits_dtype of every plan of ours
DEFAULT_NODES = 63  # of mc_sim_7b_63
PADDING = 8


@functools.cache
def load(checkpoint):
    """Return the stock model, exact in float64."""
    from benchmarks.stock_model import StockModel

    return StockModel(Path(checkpoint)).model


@functools.lru_cache(4096)
@torch.inference_mode()
def logits_of(checkpoint, ids, num_rows):
    """Return (num_rows, V) float64 logits behind the last ids; remembered, since the tests ask much the same."""
    output = load(checkpoint)(input_ids=torch.tensor([ids]), use_cache=False)
    return output.logits[0, -num_rows:].double().numpy()


class Engine:
    """Limits and forward passes. max_seq_len: as built, so with room for the drafts."""

    def __init__(self, folder, version, decoding_config):
        config = json.loads((Path(folder) / "config.json").read_text())
        check(config["version"] == version, f"engine of {config['version']}, library {version}")
        limits = config["build_config"]
        self.mode = limits["speculative_decoding_mode"]
        self.max_draft_len, self.max_seq_len = limits["max_draft_len"], limits["max_seq_len"]
        self.max_batch_size = limits["max_batch_size"]
        pretrained = config["pretrained_config"]  # of an EAGLE checkpoint, as its conversion leaves it
        self.eagle_layers = pretrained.get("num_eagle_layers", float("inf"))
        self.eagle_non_leaves = pretrained.get("max_non_leaves_per_layer", float("inf"))
        self.drafts_inside = self.mode in MODES
        self.lookahead = decoding_config.lookahead_decoding_config
        self._check_mode(decoding_config)
        self._checkpoint = (Path(folder) / "rank0.engine").read_text()
        self.vocab_size = load(self._checkpoint).config.vocab_size

    def _check_mode(self, config):
        wanted = MODES.get(self.mode)
        if config.decoding_mode and wanted and config.decoding_mode != wanted:
            log.warning("the decoding mode %s is overwritten by the engine's %s", config.decoding_mode, wanted)
        trees = {"medusa": config.medusa_choices, "eagle": config.eagle_config and config.eagle_config.eagle_choices}
        if self.mode in trees:
            self._check_tree(trees[self.mode])
        if self.mode == LOOKAHEAD:
            check(self.lookahead is not None, "a lookahead engine needs the executor's lookahead sizes")
            check(self.lookahead.draft_len <= self.max_draft_len, "lookahead needs more than max_draft_len")

    def _check_tree(self, choices):
        """Inferred: a tree has the nodes that the engine was built for, as its own one of 63 nodes has."""
        num_nodes = DEFAULT_NODES if choices is None else len(choices)
        check(num_nodes == self.max_draft_len, f"a tree of {num_nodes} nodes, max_draft_len {self.max_draft_len}")
        self._check_choices(choices or [])

    def check(self, request):
        """Raise what the library asserts of a request that this engine cannot run."""
        num_drafts, output = len(request.drafts), request.output_config
        if num_drafts > self._most_external:
            raise RuntimeError(
                f"Number of draft tokens ({num_drafts}) larger than maximum number of draft tokens "
                f"({self._most_external})"
            )
        most = len(request.input_token_ids) + request.max_tokens
        check(most <= self.max_seq_len, f"prompt and output of {most} tokens exceed max_seq_len {self.max_seq_len}")
        check(
            not num_drafts or request.max_tokens > num_drafts,
            f"{num_drafts} drafts need an output of one token more, max_tokens is {request.max_tokens}",
        )
        odd = [token for token in [*request.input_token_ids, *request.drafts] if not 0 <= token < self.vocab_size]
        check(not odd, f"the token {odd[:1]} is outside of the vocabulary of {self.vocab_size}")
        check(request.sampling_config.beam_width == 1, "beam width 1")
        check(request.num_return_sequences in (None, 1), "one sequence, in this stand-in")
        check(not (output.return_context_logits and self.max_draft_len), "no context logits with drafts")
        bias = request.embedding_bias
        check(bias is None or bias.shape == (self.vocab_size,), "embedding bias is [V]")
        check(bias is None or bias.dtype == LOGITS, f"embedding bias is {LOGITS}, as the logits are")
        self._check_inside(request)

    @property
    def _most_external(self):
        return self.max_draft_len if self.mode == EXTERNAL else 0

    def _check_inside(self, request):
        config = request.lookahead_config
        if config is not None:
            check(self.mode == LOOKAHEAD, "lookahead sizes for another engine")
            check(self.lookahead.covers(config), f"lookahead {config.triple} beyond {self.lookahead.triple}")
        if request.eagle_config is not None:
            check(self.mode == "eagle", "eagle choices for another engine")
            self._check_choices(request.eagle_config.eagle_choices or [])
        check(self.mode != "medusa" or request.sampling_config.greedy, "medusa verifies at temperature 0")

    def _check_choices(self, choices):
        """Every node of the tree must be listed, and the engine must have room for all."""
        paths = {tuple(path) for path in choices}
        check(len(paths) == len(choices), "a node twice")
        check(len(paths) <= self.max_draft_len, f"{len(paths)} eagle choices, max_draft_len {self.max_draft_len}")
        check(all(len(path) == 1 or path[:-1] in paths for path in paths), "a node without its parent")
        parents = collections.Counter(len(parent) for parent in {path[:-1] for path in paths} if parent)
        check(max(map(len, paths), default=0) <= self.eagle_layers, f"more levels than {self.eagle_layers} layers")
        check(max(parents.values(), default=0) <= self.eagle_non_leaves, f"non-leaves above {self.eagle_non_leaves}")

    def logits(self, ids, num_rows):
        """Return (num_rows, V) float64 logits behind the last ids."""
        return logits_of(self._checkpoint, tuple(ids), num_rows)

    def padded(self, rows):
        """Return (n, Vpad) float32 as the library does, its vocabulary padded with what nobody may read."""
        width = -(-(self.vocab_size + 1) // PADDING) * PADDING
        wide = np.full((len(rows), width), 1e4)
        wide[:, : self.vocab_size] = rows
        return torch.tensor(wide, dtype=torch.float32)

    def guess(self, request, generated, rng):
        """Draft inside: what the model would say, each token wrong one time in five."""
        drafts, context = [], request.input_token_ids + generated
        while len(drafts) < min(self._depth(request), self.max_draft_len):
            said = int(self.logits(context + drafts, 1).argmax())
            drafts.append(int(rng.integers(self.vocab_size)) if rng.random() < 0.2 else said)
        return drafts

    @staticmethod
    def _depth(request):
        """Levels that a request has the engine draft."""
        if request.lookahead_config is not None:
            return min(NUM_GUESSED, request.lookahead_config.draft_len)
        choices = (request.eagle_config and request.eagle_config.eagle_choices) or []
        return max((len(path) for path in choices), default=NUM_GUESSED)
