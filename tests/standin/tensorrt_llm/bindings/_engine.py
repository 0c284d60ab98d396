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
# mc_sim_7b_63: nodes, levels, nodes of one level with children (runtime/utils/speculativeChoicesUtils.h)
DEFAULT_NODES, DEFAULT_DEPTH, DEFAULT_NON_LEAVES = 63, 4, 10
LOOKAHEAD_REQUESTS = 8  # DecodingConfig::mLookaheadDecodingMaxNumRequest (executor.h)
PADDING = 8


@functools.cache
def load(checkpoint):
    """Return the stock model, exact in float64."""
    from benchmarks.stock_model import StockModel

    return StockModel(Path(checkpoint)).model


@functools.lru_cache(4096)
@torch.inference_mode()
def logits_of(checkpoint, ids, num_rows):
    """Return (num_rows, V) float64 logits after the last ids; remembered, since the tests ask much the same."""
    output = load(checkpoint)(input_ids=torch.tensor([ids]), use_cache=False)
    return output.logits[0, -num_rows:].double().numpy()


class Engine:
    """Limits and forward passes. max_seq_len: as built, so with room for the drafts.

    The checks at load are those of trtGptModelInflightBatching.cpp, of a request those of llmRequest.cpp (validate), of
    a pass those of createNewDecoderRequests.cpp, all in cpp/tensorrt_llm/batch_manager.
    """

    def __init__(self, folder, version, executor_config):
        decoding_config, self.reuses = (
            executor_config.decoding_config,
            executor_config.kv_cache_config.enable_block_reuse,
        )
        config = json.loads((Path(folder) / "config.json").read_text())
        check(config["version"] == version, f"engine of {config['version']}, library {version}")
        limits = config["build_config"]
        self.mode = limits["speculative_decoding_mode"]
        self.max_draft_len, self.max_seq_len = limits["max_draft_len"], limits["max_seq_len"]
        self.max_batch_size, self.max_num_tokens = limits["max_batch_size"], limits.get("max_num_tokens", 8192)
        self.is_chunked = executor_config.enable_chunked_context
        pretrained = config["pretrained_config"]  # of an EAGLE checkpoint, as its conversion leaves it
        self.eagle_layers = pretrained.get("num_eagle_layers", 0)
        self.eagle_non_leaves = pretrained.get("max_non_leaves_per_layer", float("inf"))
        self.medusa_heads = pretrained.get("num_medusa_heads", DEFAULT_DEPTH)
        self.drafts_inside = self.mode in MODES
        self.lookahead, self.eagle = decoding_config.lookahead_decoding_config, decoding_config.eagle_config
        self.is_lookahead_on = self.mode == LOOKAHEAD
        self._check_load(decoding_config)
        self._checkpoint = (Path(folder) / "rank0.engine").read_text()
        self.vocab_size = load(self._checkpoint).config.vocab_size

    @property
    def max_input_len(self):
        """TrtGptModel's mMaxInputLen: the engine's flag is ignored with packed input and paged context attention."""
        longest = self.max_seq_len - 1
        return longest if self.is_chunked else min(longest, self.max_num_tokens)

    def _check_load(self, config):
        wanted = MODES.get(self.mode)
        if config.decoding_mode and wanted and config.decoding_mode != wanted:
            log.warning("the decoding mode %s is overwritten by the engine's %s", config.decoding_mode, wanted)
        check(
            self.mode != EXTERNAL or self.reuses,
            "KV cache block reuse must be enabled for speculative decoding target model",
        )
        if self.mode == "medusa":
            choices = config.medusa_choices
            depth = DEFAULT_DEPTH if choices is None else max(map(len, choices))
            check(self._num_nodes(choices) == self.max_draft_len, "nodes of the tree and max_draft_len")
            check(depth <= self.medusa_heads, "Choices require larger maxPathLen")
        if self.mode == "eagle" and self.eagle and self.eagle.use_dynamic_tree:
            self._check_dynamic_tree(self.eagle.dynamic_tree_max_topK or -1)
        if self.mode == LOOKAHEAD:
            check(self.lookahead is not None, "a lookahead engine needs the executor's lookahead sizes")
            check(self.lookahead.draft_len <= self.max_draft_len, "lookahead needs more than max_draft_len")

    def _check_dynamic_tree(self, top_k):
        """The checks of EagleBuffers' constructor (runtime/eagleBuffers.cpp)."""
        check(top_k > 0, "dynamicTreeMaxTopK should greater than 0")
        check(
            self.eagle_non_leaves >= top_k, "maxNonLeafNodesPerLayer should be greater or equal to dynamicTreeMaxTopK"
        )
        check(self.max_draft_len >= top_k, "maxDecodingDraftTokens should be greater or equal to dynamicTreeMaxTopK")

    @staticmethod
    def _num_nodes(choices):
        return DEFAULT_NODES if choices is None else len(choices)

    def validate(self, request):
        """Raise what makes a request's response an error, and shorten what the library shortens without a word."""
        num_prompt, drafts = len(request.input_token_ids), request.drafts
        self._check_limits(request)
        if num_prompt > self.max_input_len:
            raise RuntimeError(f"Prompt length ({num_prompt}) exceeds maximum input length ({self.max_input_len})")
        step_drafts = self.max_draft_len
        if drafts:
            if len(drafts) > self.max_draft_len or self.mode != EXTERNAL:
                raise RuntimeError(f"Draft tokens length ({len(drafts)}) exceeds maximum ({self.max_draft_len})")
            del drafts[max(self.max_input_len - num_prompt, 0) :]
            step_drafts = len(drafts)
        request.max_tokens = min(request.max_tokens, self.max_seq_len - num_prompt - step_drafts)
        check(request.max_tokens > 0, "no room for a token")

    def _check_limits(self, request):
        output, bias = request.output_config, request.embedding_bias
        external = request.external_draft_tokens_config
        odd = [token for token in [*request.input_token_ids, *request.drafts] if not 0 <= token < self.vocab_size]
        check(not odd, f"the token {odd[:1]} is outside of the vocabulary of {self.vocab_size}")
        check(request.sampling_config.beam_width == 1, "beam width 1")
        check(request.num_return_sequences in (None, 1), "one sequence, in this stand-in")
        check(not (output.return_context_logits and self.max_draft_len), "no context logits with drafts")
        check(bias is None or bias.shape == (self.vocab_size,), "embedding bias is [V]")
        check(bias is None or bias.dtype == LOGITS, f"embedding bias is {LOGITS}, as the logits are")
        if external is not None and external.logits is not None:  # copied into a slot of the engine's own logits
            check(external.logits.dtype == LOGITS, f"draft logits are {LOGITS}, as the engine's")
            check(external.logits.shape[1] == self.vocab_size, "draft logits have the engine's columns")
        if request.lookahead_config is not None:
            check(self.mode == LOOKAHEAD, "lookahead sizes for another engine")
            check(self.lookahead.covers(request.lookahead_config), "lookahead sizes beyond the engine's")

    def check_in_pass(self, request):
        """Raise what the library asserts only inside a pass, where it ends all requests."""
        if self.mode == "eagle":
            config = request.eagle_config or self.eagle
            if config is None or not config.use_dynamic_tree:
                self._check_eagle_tree(config and config.eagle_choices)

    def _check_eagle_tree(self, choices):
        depth = DEFAULT_DEPTH if choices is None else max(map(len, choices))
        paths = {tuple(path) for path in choices or []}
        check(len(paths) == len(choices or []), "a node twice")
        check(self._num_nodes(choices) <= self.max_draft_len, "more nodes than max_draft_len")
        check(all(len(path) == 1 or path[:-1] in paths for path in paths), "a node without its parent")
        parents = collections.Counter(len(parent) for parent in {path[:-1] for path in paths} if parent)
        widest = DEFAULT_NON_LEAVES if choices is None else max(parents.values(), default=0)
        check(widest <= self.eagle_non_leaves, "more non-leaves than max_non_leaves_per_layer")
        check(
            depth == self.eagle_layers,
            "EAGLE-1 requires Eagle-tree depth being equal to the the number of build-time EAGLE layers.",
        )

    def schedule(self, batch):
        """Switch Lookahead off where the library does, and on again where a batch has nothing that generates.

        Source: TrtGptModelInflightBatching::changeSpecDecMode, called in forwardAsync.
        """
        if self.mode != LOOKAHEAD:
            return
        if len(batch) > LOOKAHEAD_REQUESTS or any(_switches_lookahead_off(active.request) for active in batch):
            self.is_lookahead_on = False
        elif not any(active.generated for active in batch):
            self.is_lookahead_on = True

    def logits(self, ids, num_rows):
        """Return (num_rows, V) float64 logits after the last ids."""
        return logits_of(self._checkpoint, tuple(ids), num_rows)

    def padded(self, rows):
        """Return (n, Vpad) float32 as the library does, its vocabulary padded with what nobody may read."""
        width = -(-(self.vocab_size + 1) // PADDING) * PADDING
        wide = np.full((len(rows), width), 1e4)
        wide[:, : self.vocab_size] = rows
        return torch.tensor(wide, dtype=torch.float32)

    def guess(self, request, generated, rng):
        """Draft inside: what the model would say, each token wrong one time in five."""
        if self.mode == LOOKAHEAD and not self.is_lookahead_on:
            return []
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


def _switches_lookahead_off(request):
    """Sampling with which Lookahead does not draft (changeSpecDecMode)."""
    config = request.sampling_config
    return bool(
        (config.top_k or 1) > 1
        or config.top_p is not None
        or config.temperature is not None
        or config.repetition_penalty is not None
        or request.bad_words
    )
