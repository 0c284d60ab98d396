"""Converts steps and drafts to tensors of NVIDIA's Triton model `tensorrt_llm`, and its answers back; pure functions.

EXPERIMENTAL: names, types and shapes are checked against a table made from the model's configuration (0.19 with the
changes of 1.x); nothing here has run on an engine. The engine itself decides acceptance: it samples its own tokens and
accepts the longest prefix of the drafts that equals them. So the text has the target's distribution, but above
temperature 0 it is not the text that our own engines give for the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from orchestrator.core.arrays import IdArray, Incoming, Tensors
from orchestrator.core.errors import EngineError
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.types import Acceptance, StepOptions

#: The outputs to request; the backend requires both.
OUTPUTS = ("output_ids", "sequence_length")
#: The counters of an engine that drafts by itself.
ACCEPTED, DRAFTED = "total_accepted_draft_tokens", "total_draft_tokens"
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
_EMPTY = np.empty(0, np.int32)


@dataclass(frozen=True)
class Backend:
    """The limits of the hosted engine.

    max_seq_len: the most tokens of prompt and text. max_draft_len: the most draft tokens per step.
    seed_input: name of the seed's tensor, `random_seed` before TensorRT-LLM 1.0.
    """

    vocab_size: int
    max_seq_len: int
    max_draft_len: int
    seed_input: str = "seed"


def step_tensors(request: StepRequest, context_ids: IdArray, backend: Backend) -> Tensors:
    """Return the input tensors of one step, each with a leading batch dimension of 1.

    context_ids: (n,) int32, all committed ids, the root last. The backend keeps no sequence; it finds the KV blocks of
    the text by content (enable_kv_cache_reuse).
    Neither stop words nor an end id are sent, so that only the generation loop ends a text.
    Raises EngineError when the step needs what the backend lacks.
    """
    _check_step(request, backend)
    drafts = request.tree.tokens
    tensors = _prompt_tensors(context_ids, len(drafts) + 1)
    if len(drafts):  # an empty tensor fails the backend's assertion on its draft tokens
        tensors["draft_input_ids"] = drafts.astype(np.int32)[None]
    return tensors | _sampling_tensors(request.sampling, len(context_ids), backend.seed_input)


def engine_side_tensors(request: StepRequest, context_ids: IdArray, length: int, backend: Backend) -> Tensors:
    """Return the input tensors that ask an engine with drafts of its own for `length` tokens and its counters.

    context_ids and errors: as in `step_tensors`.
    """
    speculation = request.options.engine_speculation
    _check_step(replace(request, options=replace(request.options, engine_speculation=None)), backend)
    tensors = _prompt_tensors(context_ids, length)
    tensors["return_perf_metrics"] = _scalar(True, np.bool_)
    for name, size in zip(_LOOKAHEAD, speculation.sizes if speculation else (), strict=False):
        tensors[name] = _scalar(size, np.int32)
    return tensors | _sampling_tensors(request.sampling, len(context_ids), backend.seed_input)


def draft_tensors(context_ids: IdArray, length: int, backend: Backend) -> Tensors:
    """Return the input tensors of a draft model's call: `length` greedy tokens after context_ids, (n,) int32."""
    return _prompt_tensors(context_ids, length) | _sampling_tensors(Sampling(), 0, backend.seed_input)


def stop_tensors() -> Tensors:
    """Return the input tensors that stop the request with the same id; the configuration requires all of them."""
    return {
        "input_ids": _scalar(0, np.int32),
        "input_lengths": _scalar(1, np.int32),
        "request_output_len": _scalar(1, np.int32),
        "stop": _scalar(True, np.bool_),
    }


def read_acceptance(answer: Incoming, drafts: Sequence[int], context_ids: IdArray, backend: Backend) -> Acceptance:
    """Return the outcome of a step: its new tokens are the accepted drafts and one token from the target.

    answer: the tensors of the response; they lack the number of accepted drafts, which follows from the growth of the
    sequence. drafts, context_ids: as sent.
    Invariant: the answer's ids are context_ids and the acceptance's tokens.
    Raises EngineError if there are no tokens, or tokens of another context or that the drafts do not allow.
    """
    tokens = read_tokens(answer, context_ids, backend)
    num_accepted = len(tokens) - 1
    if not tokens or tokens[:-1] != list(drafts[:num_accepted]) or tokens == list(drafts[: len(tokens)]):
        raise EngineError(f"the backend answered {len(tokens)} new tokens that {len(drafts)} drafts do not allow")
    return Acceptance(tuple(range(1, num_accepted + 1)), tokens[-1])


def read_tokens(answer: Incoming, context_ids: IdArray, backend: Backend) -> list[int]:
    """Return the tokens after the context; arguments and errors as in `read_acceptance`."""
    ids, n = _answered_ids(answer), len(context_ids)
    if not np.array_equal(ids[:n], context_ids):
        raise EngineError(
            "the backend's output_ids do not begin with the input (exclude_input_in_output must be false)"
        )
    tokens: list[int] = ids[n:].tolist()
    if tokens and not 0 <= min(tokens) <= max(tokens) < backend.vocab_size:
        raise EngineError(f"the backend answered a token outside 0..{backend.vocab_size - 1}")
    return tokens


def _answered_ids(answer: Incoming) -> npt.NDArray[np.int32]:
    """Return the (length,) int32 ids of a response, cut at its sequence_length."""
    ids, lengths = answer.get("output_ids", _EMPTY), answer.get("sequence_length", _EMPTY)
    if not ids.size:
        raise EngineError("the backend's response has no output_ids (was the request cancelled?)")
    if ids.dtype != np.int32 or lengths.dtype != np.int32:
        raise EngineError(f"the backend answered output_ids {ids.dtype} and sequence_length {lengths.dtype}, not int32")
    if ids.shape[:-1] != (1, 1) or lengths.size != 1:
        raise EngineError(
            f"the backend answered output_ids {ids.shape} and sequence_length {lengths.shape}, not one beam"
        )
    length = int(lengths.reshape(-1)[0])
    if not 0 <= length <= ids.shape[-1]:
        raise EngineError(f"the backend's sequence_length {length} is beyond its {ids.shape[-1]} output_ids")
    answered: npt.NDArray[np.int32] = ids[0, 0, :length]
    return answered


def _prompt_tensors(context_ids: IdArray, num_tokens: int) -> Tensors:
    """Return the tensors that every call has: the context, and how many tokens to generate after it."""
    return {
        "input_ids": context_ids.astype(np.int32)[None],
        "input_lengths": _scalar(len(context_ids), np.int32),
        "request_output_len": _scalar(num_tokens, np.int32),
    }


def _sampling_tensors(sampling: Sampling, prefix_len: int, seed_input: str) -> Tensors:
    """Return the sampler's settings; top_k and top_p are always sent, because the backend's defaults are greedy.

    Inferred: top_k 0 and top_p 1 switch them off. The engine's random generator restarts with each call, so each step
    has a seed of its own, derived from the request's.
    """
    if sampling.greedy:
        return {"runtime_top_k": _scalar(1, np.int32)}
    return {
        "temperature": _scalar(sampling.temperature, np.float32),
        "runtime_top_k": _scalar(sampling.top_k, np.int32),
        "runtime_top_p": _scalar(sampling.top_p, np.float32),
        seed_input: _scalar(child_seed(sampling.seed, prefix_len), np.uint64),
    }


def _check_step(request: StepRequest, backend: Backend) -> None:
    if lacking := ", ".join(_lacking(request, backend)):
        raise EngineError(f"the backend tensorrtllm has no {lacking}")


def _lacking(request: StepRequest, backend: Backend) -> Iterator[str]:
    """Yield the features that the step needs and the backend lacks, as they complete "the backend has no …"."""
    sampling, tree, prefix_len = request.sampling, request.tree, request.delta.prefix_len
    if not tree.is_chain:
        yield "trees that branch"
    if tree.num_nodes > backend.max_draft_len:
        yield f"room for {tree.num_nodes} draft tokens (its max_draft_len is {backend.max_draft_len})"
    if prefix_len + tree.num_nodes >= backend.max_seq_len:  # a truncated text would look like one that has ended
        yield f"room for {prefix_len} tokens and this step's (its max_seq_len is {backend.max_seq_len})"
    if request.q:
        yield "rule that reads q"
    if sampling.rule is Rule.TYPICAL:
        yield "rule 'typical'"
    if sampling.min_p > 0.0 or sampling.typical_p < 1.0:
        yield "min_p or typical_p"
    if sampling.needs_logits_processors:  # each call counts penalties and min_tokens from its own start (inferred)
        yield "penalties, bias, masks, grammars or min_tokens over several steps"
    if request.options != StepOptions():
        yield "target tokens, log-probabilities or features"


def _scalar(value: float, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    """Return a (1, 1) tensor: one value for one request."""
    return np.array([[value]], dtype)
