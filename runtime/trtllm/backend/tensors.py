"""Steps and drafts in the tensors of NVIDIA's Triton model `tensorrt_llm`, and answers back; pure, calls nothing.

EXPERIMENTAL: names, types and shapes are checked against a table compiled from the model's configuration (0.19 with the
changes of 1.x); nothing here has been run on an engine. The engine decides acceptance by itself: it draws its own
tokens, and accepts the longest prefix of the drafts that equals them. So the text has the target's law, but at a
temperature above 0 it is not the text that our own engines give for the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from orchestrator.core.errors import EngineError
from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, IdArray, StepOptions
from orchestrator.wire.target import StepRequest
from orchestrator.wire.tensors import Incoming, Tensors

#: The outputs to ask for; the backend wants both asked for.
OUTPUTS = ("output_ids", "sequence_length")
#: What an engine that drafts by itself has counted, beside them.
ACCEPTED, DRAFTED = "total_accepted_draft_tokens", "total_draft_tokens"
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")


@dataclass(frozen=True)
class Backend:
    """What must be known of the hosted engine.

    max_seq_len: most tokens of prompt and text. max_draft_len: most draft tokens a step. end_id: where the engine
    itself ends a text; None = nowhere, the loop does.
    seed_input: the seed's tensor, `random_seed` before TensorRT-LLM 1.0.
    """

    vocab_size: int
    max_seq_len: int
    max_draft_len: int
    end_id: int | None = None
    pad_id: int | None = None
    seed_input: str = "seed"


def step_tensors(request: StepRequest, context_ids: IdArray, backend: Backend) -> Tensors:
    """Return the input tensors of one step, each with a leading batch dimension of 1.

    context_ids: (n,) int32, all committed ids with the root last; the backend keeps no sequence, it finds the KV blocks
    of the text again (enable_kv_cache_reuse).
    Stop words are never sent: the loop looks for stops in the text.
    Raises EngineError: the step asks for what the backend lacks, or `context_ids` is not the request's context.
    """
    _check_step(request, context_ids, backend)
    drafts = request.tree.tokens
    tensors = _prompt_tensors(context_ids, len(drafts) + 1, backend)
    if len(drafts):  # an empty tensor fails the backend's assertion on its draft tokens
        tensors["draft_input_ids"] = drafts.astype(np.int32)[None]
    return tensors | _sampling_tensors(request.sampling, len(context_ids), backend.seed_input)


def burst_tensors(request: StepRequest, context_ids: IdArray, length: int, backend: Backend) -> Tensors:
    """Return the input tensors of a step of an engine that drafts by itself: `length` tokens, and that it shall count.

    Errors as in `step_tensors`.
    """
    inside = request.options.engine_speculation
    _check_step(replace(request, options=replace(request.options, engine_speculation=None)), context_ids, backend)
    tensors = _prompt_tensors(context_ids, length, backend)
    tensors["return_perf_metrics"] = _scalar(True, np.bool_)
    for name, size in zip(_LOOKAHEAD, inside.sizes if inside else (), strict=False):
        tensors[name] = _scalar(size, np.int32)
    return tensors | _sampling_tensors(request.sampling, len(context_ids), backend.seed_input)


def draft_tensors(context_ids: IdArray, length: int, backend: Backend) -> Tensors:
    """Return the input tensors of a draft model's call: the greedy continuation of (n,) int32 by `length` tokens."""
    return _prompt_tensors(context_ids, length, backend) | _sampling_tensors(Sampling(), 0, backend.seed_input)


def stop_tensors() -> Tensors:
    """Return the input tensors that end the request of the same id; what the configuration demands goes along."""
    return {
        "input_ids": _scalar(0, np.int32),
        "input_lengths": _scalar(1, np.int32),
        "request_output_len": _scalar(1, np.int32),
        "stop": _scalar(True, np.bool_),
    }


def accepted(responses: Sequence[Incoming], tree: TokenTree, context_ids: IdArray, backend: Backend) -> Acceptance:
    """Return what a step decided.

    responses: the tensors of each response; a decoupled backend adds empty ones, which are left out.
    tree, context_ids: what was sent. The accepted length is nowhere in the answer: it follows from how far the
    sequence has grown. Invariant: the answer's ids are context_ids and acceptance.tokens(tree), but for an
    end that the engine has dropped.
    Raises EngineError: not one answer, not of our context, or none that the drafts allow.
    """
    return _acceptance(new_tokens(responses, context_ids, backend), tree.tokens.tolist(), backend.end_id)


def new_tokens(responses: Sequence[Incoming], context_ids: IdArray, backend: Backend) -> list[int]:
    """Return the tokens behind the context; arguments and errors as in `accepted`."""
    ids = _answered_ids(responses)
    n = len(context_ids)
    if not np.array_equal(ids[:n], context_ids):
        raise EngineError(
            "the backend's output_ids do not begin with the input (exclude_input_in_output must be false)"
        )
    new: list[int] = ids[n:].tolist()
    if new and not 0 <= min(new) <= max(new) < backend.vocab_size:
        raise EngineError(f"the backend answered a token outside 0..{backend.vocab_size - 1}")
    return new


def _acceptance(new: list[int], drafts: list[int], end_id: int | None) -> Acceptance:
    """Infer path and next token from the new tokens: the accepted drafts, then one of the target's own.

    An engine that ends at `end_id` stops short. Whether it keeps that id is not established, so both are read: kept, it
    is the last new token; dropped, the new tokens are drafts only, and the id itself is what the target said next.
    """
    only_drafts = new == drafts[: len(new)]
    if only_drafts and end_id is not None and new[-1:] != [end_id]:
        new = [*new, end_id]
    num_accepted = len(new) - 1
    if not new or new[:-1] != drafts[:num_accepted] or (only_drafts and end_id is None):
        raise EngineError(f"the backend answered {len(new)} new tokens that {len(drafts)} drafts do not allow")
    return Acceptance(tuple(range(1, num_accepted + 1)), new[-1])


def _answered_ids(responses: Sequence[Incoming]) -> npt.NDArray[np.int32]:
    """Return the (length,) int32 ids of the one response that has any, cut at its sequence_length."""
    answers = [tensors for tensors in responses if tensors.get("output_ids", _NOTHING).size]
    if len(answers) != 1:
        raise EngineError(f"the backend gave {len(answers)} answers to a step, expected one (cancelled, or streaming?)")
    ids, lengths = answers[0]["output_ids"], answers[0].get("sequence_length", _NOTHING)
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


_NOTHING = np.empty(0, np.int32)


def _prompt_tensors(context_ids: IdArray, num_tokens: int, backend: Backend) -> Tensors:
    """Return what every call has: the context, how many tokens shall come behind it, and where they may end."""
    tensors: Tensors = {
        "input_ids": context_ids.astype(np.int32)[None],
        "input_lengths": _scalar(len(context_ids), np.int32),
        "request_output_len": _scalar(num_tokens, np.int32),
    }
    if backend.end_id is not None:
        tensors["end_id"] = _scalar(backend.end_id, np.int32)
    if backend.pad_id is not None:
        tensors["pad_id"] = _scalar(backend.pad_id, np.int32)
    return tensors


def _sampling_tensors(sampling: Sampling, prefix_len: int, seed_input: str) -> Tensors:
    """Return the sampler's settings; top_k and top_p always stand there, because the backend's defaults are greedy.

    That 0 and 1 switch them off is inferred. Each call starts the engine's generator anew: with the request's own seed
    every step would draw the same numbers, so each step's is derived from it.
    """
    if sampling.greedy:
        return {"runtime_top_k": _scalar(1, np.int32)}
    return {
        "temperature": _scalar(sampling.temperature, np.float32),
        "runtime_top_k": _scalar(sampling.top_k, np.int32),
        "runtime_top_p": _scalar(sampling.top_p, np.float32),
        seed_input: _scalar(child_seed(sampling.seed, prefix_len), np.uint64),
    }


def _lacking(request: StepRequest, backend: Backend) -> Iterator[str]:
    """Yield what the step asks for and the backend cannot do."""
    sampling, options = request.sampling, request.options
    if not request.tree.is_chain:
        yield "trees that branch"
    if request.tree.num_nodes > backend.max_draft_len:
        yield f"room for {request.tree.num_nodes} draft tokens (its max_draft_len is {backend.max_draft_len})"
    if request.delta.prefix_len + request.tree.num_nodes >= backend.max_seq_len:  # cut short, it would look like an end
        yield f"room for {request.delta.prefix_len} tokens and this step's (its max_seq_len is {backend.max_seq_len})"
    if request.q:
        yield "rule that reads q"
    if sampling.rule is Rule.TYPICAL:
        yield "rule 'typical'"
    if sampling.min_p > 0.0 or sampling.typical_p < 1.0:
        yield "min_p or typical_p"
    if sampling.shaped:  # each call counts penalties and min_tokens from its own beginning (inferred)
        yield "penalties, bias, masks, grammars or min_tokens over several steps"
    if options != StepOptions():
        yield "picks, log-probabilities or features"


def _check_step(request: StepRequest, context_ids: IdArray, backend: Backend) -> None:
    if lacking := ", ".join(_lacking(request, backend)):
        raise EngineError(f"the backend tensorrtllm has no {lacking}")
    _check_context(request, context_ids)


def _check_context(request: StepRequest, context_ids: IdArray) -> None:
    delta = request.delta
    known = context_ids[delta.context_start :]
    if not len(context_ids) or not np.array_equal(known, delta.context_ids):
        raise EngineError(f"the context has {len(context_ids)} ids that do not end as the step's {delta.prefix_len} do")


def _scalar(value: float, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    """Return a (1, 1) tensor: one value for one request."""
    return np.array([[value]], dtype)
