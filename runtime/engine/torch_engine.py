"""Builds the torch engines: warm engine threads over paged models, with the fastest number of CPU threads."""

from __future__ import annotations

import logging
import math
import os
import time

import torch
from transformers import AutoConfig

from orchestrator.core.context import Context
from orchestrator.core.declarations import validate_config
from orchestrator.core.deployment.checkpoint import check_same_tokens
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.engine_manifest import served_checkpoint
from orchestrator.core.grammar import Grammars
from orchestrator.core.messages.context import Delta, delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import HiddenStates, StepOptions
from runtime.engine.build_engines import ModelCaller
from runtime.engine.draft import DraftEngine
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import CPU_PASS_TOKENS, Model, PagedModel
from runtime.engine.profile import measured_costs
from runtime.engine.target import TargetEngine
from runtime.engine.target_thread import TargetThread
from runtime.engine.thread import EngineThread
from runtime.models.heads.checkpoint.checks import MeasuredKeys
from runtime.models.heads.sharpness import Sharpness
from runtime.models.load import check_device, load_model
from runtime.models.native.families import kv_numbers
from runtime.models.native.model import NativeModel
from runtime.models.stock import read_pretrained

log = logging.getLogger(__name__)

# Tokens of long contexts in a pass on a GPU; fewer would take about as long.
GPU_PASS_TOKENS = 2048
# The pass that is timed to choose the number of threads, and how often it is run.
NUM_CONTEXT, NUM_DRAFTS, NUM_TIMED = 64, 8, 10
# A larger number of threads is chosen only if a pass takes less than this fraction of the time.
GAIN = 0.9


def build_target(config: ServingConfig, caller: ModelCaller) -> tuple[TargetThread, Model]:
    """Load the target and start its engine; raises ConfigError if it cannot be served."""
    return start_target(_load(config.target, config, hidden_states_of(config)), config)


def hidden_states_of(config: ServingConfig) -> HiddenStates:
    """Return the hidden states of the target that a deployment's heads read."""
    last = HiddenStates.LAST if config.medusa or config.eagle or config.redrafter else HiddenStates.NONE
    return last | (HiddenStates.LAYERS if config.eagle3 else HiddenStates.NONE)


def start_target(paged: PagedModel, config: ServingConfig) -> tuple[TargetThread, Model]:
    """Start a target engine over a loaded model, and warm it up with a prefill, a plain step and a tree.

    If the deployment has runs, passes are measured before that, for the proposers in this process.
    """
    delta, tree = _warm_up_delta(paged), TokenTree.from_paths([[0, 1], [1]])
    warm_up = [
        StepRequest(delta, TokenTree.bare(), Sampling(), StepOptions(), 1000),
        StepRequest(delta, tree, Sampling(1.0, top_p=0.9), StepOptions(), 1000),
    ]
    thread = TargetThread(TargetEngine(paged), "target-engine", paged.model.prepare, _grammars(config, paged))
    thread.pass_costs = measured_costs(paged) if config.is_colocated else None
    thread.warm_up(warm_up)
    return thread, paged.model


def build_draft(config: ServingConfig, caller: ModelCaller) -> tuple[EngineThread[DraftRequest], Model]:
    """Load the draft model and start its engine; raises ConfigError if it cannot be served."""
    engine = load_draft(config)
    thread = EngineThread(engine, "draft-engine", engine.paged.model.prepare)
    thread.warm_up(draft_warm_up(engine))
    return thread, engine.paged.model


def load_draft(config: ServingConfig) -> DraftEngine:
    """Load the draft model, with a cache for as many tokens as the target's; raises ConfigError if it cannot serve."""
    check_same_tokens(config.draft, config.target)
    draft, target = (read_pretrained(AutoConfig, model) for model in (config.draft, config.target))
    share = kv_numbers(draft.get_text_config()) / kv_numbers(target.get_text_config())
    memory_mb = max(math.ceil(config.kv_memory_mb * share), 1)
    measured = validate_config(MeasuredKeys, draft.to_dict(), f"{config.draft}/config.json").sharpness
    vocab_size = target.get_text_config().vocab_size
    paged = _load(config.draft, config.model_copy(update={"kv_memory_mb": memory_mb}), HiddenStates.NONE, vocab_size)
    return DraftEngine(paged, Sharpness(measured.argmax, measured.sampled))


def draft_warm_up(engine: DraftEngine) -> list[DraftRequest]:
    """Return the calls that warm the draft model up: one greedy, one sampled."""
    delta = _warm_up_delta(engine.paged)
    return [DraftRequest(delta, sampling, 4, 4) for sampling in (Sampling(), Sampling(1.0, top_p=0.9))]


def _warm_up_delta(paged: PagedModel) -> Delta:
    return delta_of(Context([token % paged.model.vocab_size for token in range(8)]), 0, 1, cache_salt="warm-up")


def _load(checkpoint: str, config: ServingConfig, features: HiddenStates, vocab_size: int = 0) -> PagedModel:
    check_device(config.device)
    model = load_model(checkpoint, config.device, config.dtype, features, config.kernels, vocab_size)
    pass_tokens = config.max_pass_tokens or (GPU_PASS_TOKENS if model.device.type == "cuda" else CPU_PASS_TOKENS)
    paged = PagedModel(model, config.kv_memory_mb, config.block_tokens, pass_tokens, config.prefix_sharing)
    if isinstance(model, NativeModel):
        torch.set_num_threads(1)  # torch still does some work around the pass, but little
        model.num_threads = _fixed_threads(model.max_threads)
        log.info("%s: native forward pass, %s threads", checkpoint, model.num_threads or "as many as are fastest")
    else:
        log.info("%s: torch forward pass, %d threads", checkpoint, choose_threads(paged))
    return paged


def _grammars(config: ServingConfig, paged: PagedModel) -> Grammars:
    """Return the grammar compiler for the target's tokenizer; its masks are as wide as the engine's logits."""
    checkpoint = served_checkpoint(config)
    return Grammars(checkpoint.tokenizer_file, paged.model.vocab_size, checkpoint.eos_ids)


def choose_threads(paged: PagedModel) -> int:
    """Set and return the number of CPU threads for a model's passes; the variable OMP_NUM_THREADS takes precedence.

    The number is measured, because it depends on model and machine. The products of a small model are too short for two
    threads: waking the second costs more than it saves, and takes a core from the other engine, the loop and the
    server.
    """
    if paged.model.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    best, best_s = 1, _pass_s(paged, 1)
    threads = 2
    while threads <= (os.cpu_count() or 1):
        pass_s = _pass_s(paged, threads)
        if pass_s < GAIN * best_s:
            best, best_s = threads, pass_s
        threads *= 2
    torch.set_num_threads(best)
    return best


def _fixed_threads(max_threads: int) -> int | None:
    """Return the number of threads that OMP_NUM_THREADS sets, within 1..max_threads; None if it sets no number."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return min(max(int(text), 1), max_threads) if text.isdigit() else None


def _pass_s(paged: PagedModel, threads: int) -> float:
    """Return the seconds of the fastest of several passes over a chain."""
    torch.set_num_threads(threads)
    tree = TokenTree.chain([1] * NUM_DRAFTS)
    sequence = paged.sequences.open(delta_of(Context([1] * NUM_CONTEXT), 0, 1, "threads"), NUM_DRAFTS, NUM_DRAFTS)
    paged.forward([Segment(sequence, 0, NUM_CONTEXT, tree)])
    times = []
    for _ in range(NUM_TIMED):
        began_s = time.perf_counter()
        paged.forward([Segment(sequence, NUM_CONTEXT - 1, NUM_CONTEXT, tree)])
        times.append(time.perf_counter() - began_s)
    paged.sequences.drop(1)
    return min(times)
