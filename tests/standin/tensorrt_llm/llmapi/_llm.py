"""NOT TensorRT-LLM: an LLM that drafts by itself, a pass of every request in turn, on the event loop of its caller."""

import asyncio
import itertools
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tensorrt_llm.bindings._configs import KvCacheConfig, typed
from tensorrt_llm.bindings._engine import load, logits_of
from tensorrt_llm.bindings._journal import Journal
from tensorrt_llm.bindings._sampling import softmax, truncated
from tensorrt_llm.llmapi._params import TABLE, DecodingConfig, SamplingParams


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    _last_token_ids_len: int = 0

    @property
    def length(self):
        return len(self.token_ids)

    @property
    def token_ids_diff(self):
        return self.token_ids[self._last_token_ids_len :]


class RequestOutput:
    """Awaitable pass by pass; its queue belongs to the event loop in which it was made."""

    def __init__(self, llm, request_id, ids, params, streaming):
        self.request_id, self.prompt_token_ids, self.prompt = request_id, ids, None
        self.outputs, self.finished, self.decoding_iter, self.error = [CompletionOutput()], False, 0, None
        self.sampling_params, self._llm, self._streaming = params, llm, streaming
        try:
            asyncio.get_running_loop()
            self._queue = asyncio.Queue()
        except RuntimeError:
            self._queue = None

    def abort(self):
        self._llm.journal.note("cancelled", id=self.request_id)
        self._llm.aborted.append(self.request_id)

    def __aiter__(self):
        return self

    async def __anext__(self):
        assert self._queue is not None, "The asyncio event loop was not present during initialization"
        if self.finished:
            raise StopAsyncIteration
        tokens, reason, error = await self._queue.get()
        output = self.outputs[0]
        output._last_token_ids_len = len(output.token_ids)
        output.token_ids.extend(tokens)
        self.decoding_iter += 1
        self.finished, output.finish_reason, self.error = reason is not None, reason, error
        return self


class Worker:
    """What an LLM's own `_executor` tells of its workers."""

    is_dead = False

    def is_shutdown(self):
        return self.is_dead


class LLM:
    """Its checks are those of tensorrt_llm/llmapi/llm.py, those of the speculation llm_args.py's.

    Also, for tests: gate, which a pass waits for; poison, a token id whose requests fail; aborted, most_at_once.
    """

    def __init__(
        self,
        model,
        tokenizer=None,
        *,
        skip_tokenizer_init=False,
        backend="pytorch",
        tensor_parallel_size=1,
        max_batch_size=2048,
        max_seq_len=None,
        max_num_tokens=8192,
        enable_chunked_prefill=False,
        kv_cache_config=None,
        speculative_config=None,
        disable_overlap_scheduler=False,
    ):
        if not (Path(model) / "config.json").is_file():
            raise ValueError(f"no checkpoint in {model}")
        if backend != "pytorch":
            raise ValueError(f"this stand-in has the backend pytorch, not {backend}")
        if tensor_parallel_size > 1:
            raise RuntimeError(f"tensor_parallel_size {tensor_parallel_size} is larger than the number of GPUs")
        typed("kv_cache_config", kv_cache_config, KvCacheConfig)
        self.speculation = self._checked(speculative_config, disable_overlap_scheduler)
        self.checkpoint, self.max_seq_len, self.max_batch_size = str(model), max_seq_len, max_batch_size
        # llmapi/llm.py, _check_arguments: the PyTorch backend refuses longer prompts unless it may cut them.
        self.longest_prompt = max_seq_len if enable_chunked_prefill else max_num_tokens
        self.skips_tokenizer, self.reuses = skip_tokenizer_init, kv_cache_config.enable_block_reuse
        self.vocab_size = load(self.checkpoint).config.vocab_size
        self.gate, self.poison, self.aborted, self.requests, self.most_at_once = threading.Event(), None, [], [], 0
        self.gate.set()
        self.is_shut = False
        self._executor = Worker()
        self._ids, self._active, self.num_passes = itertools.count(1), 0, 0
        self.journal = Journal(model)

    @staticmethod
    def _checked(config, disable_overlap_scheduler):
        if config is None:
            return None
        if not isinstance(config, DecodingConfig):
            raise ValueError(f"speculative_config must be a decoding configuration, got {type(config).__name__}")
        if config.decoding_type in TABLE["compiled_engines_only"]:
            raise ValueError(f"{config.decoding_type} is not supported by the PyTorch backend")
        if config.decoding_type in TABLE["disable_overlap_scheduler"] and not disable_overlap_scheduler:
            raise ValueError(f"{config.decoding_type} needs disable_overlap_scheduler")
        drafter = config.fields.get("speculative_model_dir") or config.fields.get("speculative_model")
        if drafter and not (Path(drafter) / "config.json").is_file():
            raise ValueError(f"no checkpoint in {drafter}")
        return config

    def generate_async(self, inputs, sampling_params=None, *, streaming=False, cache_salt=None):
        params = typed("sampling_params", sampling_params, SamplingParams) or SamplingParams()
        if not (isinstance(inputs, list) and inputs and all(type(token) is int for token in inputs)):
            raise TypeError(f"inputs must be token ids, got {inputs!r}")
        if params.end_id is None and self.skips_tokenizer:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if len(inputs) > self.longest_prompt:
            raise ValueError(f"{len(inputs)} tokens of prompt exceed max_num_tokens {self.longest_prompt}")
        if len(inputs) + params.max_tokens > self.max_seq_len:
            raise ValueError(f"{len(inputs)} + {params.max_tokens} tokens exceed max_seq_len {self.max_seq_len}")
        typed("cache_salt", cache_salt, str)
        if self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        output = RequestOutput(self, next(self._ids), inputs, params, streaming)
        self.requests.append((inputs, params, cache_salt))
        self.journal.note("enqueued", id=output.request_id, max_tokens=params.max_tokens)
        output._task = asyncio.get_running_loop().create_task(self._run(output))
        return output

    def shutdown(self):
        self.is_shut = True
        self._executor.is_dead = True

    def break_down(self):
        """For tests: die as a worker does; what is under way never ends."""
        self._executor.is_dead = True

    async def _run(self, output):
        self._active += 1
        self.most_at_once = max(self.most_at_once, self._active)
        try:
            while not output.finished and output.request_id not in self.aborted:
                while self._executor.is_dead or not (self.gate.is_set() and self.journal.may_pass(self.num_passes)):
                    await asyncio.sleep(0.005)
                if self.poison in output.prompt_token_ids:
                    output._queue.put_nowait(([], "cancelled", "poisoned\nby a test"))
                    return
                if self._pass(output):
                    return
                await asyncio.sleep(0)
        finally:
            self._active -= 1

    def _pass(self, output):
        """Run one pass of a request: drafts, verified by token match; True at its end."""
        params = output.sampling_params
        self.num_passes += 1
        self.journal.note("pass", number=self.num_passes, ids=[output.request_id])
        state = output.__dict__.setdefault("_said", [])
        rng = output.__dict__.setdefault("_rng", np.random.default_rng(params.seed or 0))
        context = output.prompt_token_ids + state
        drafts = self._drafts(context, rng)[: params.max_tokens - len(state) - 1] if state else []
        rows, new = logits_of(self.checkpoint, tuple(context + drafts), len(drafts) + 1), []
        for row, draft in itertools.zip_longest(rows, drafts):
            new.append(pick(row, params, rng))
            if new[-1] != draft:
                break
        state += new
        reason = "length" if len(state) >= params.max_tokens else None
        output._queue.put_nowait((new, reason, None))
        return reason is not None

    def _drafts(self, context, rng):
        """Draft what the model would say, each token wrong one time in five."""
        drafts = []
        while self.speculation and len(drafts) < self.speculation.draft_len:
            said = int(logits_of(self.checkpoint, tuple(context + drafts), 1)[0].argmax())
            drafts.append(int(rng.integers(self.vocab_size)) if rng.random() < 0.2 else said)
        return drafts


def pick(logits, params, rng):
    if params.greedy:
        return int(logits.argmax())
    probs = truncated(softmax(logits / (params.temperature or 1.0)), params)
    return int(rng.choice(len(probs), p=probs))
