"""From a request's inputs to a job for the loop: prompt, sampling, stops, method, limits; every default is here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from orchestrator.checkpoint import Checkpoint
from orchestrator.config import ServingConfig
from orchestrator.errors import ConfigError, RequestError
from orchestrator.loop import Limits
from orchestrator.methods import Plan, plan
from orchestrator.request import MAX_SALT_BYTES, MAX_TEXT_BYTES, Given, check_range, check_size, check_words
from orchestrator.text import StopRule
from orchestrator.types import Sampling, Want

MAX_TIMEOUT_MS = 86_400_000
PREDICTED = "predicted"


@dataclass(frozen=True)
class Job:
    """One request, checked: nothing in it can be refused any more, but a method that lacks what it drafts from."""

    prompt: list[int]
    prompt_text: str
    sampling: Sampling
    stop: StopRule
    plan: Plan
    prediction: tuple[int, ...]
    limits: Limits
    want: Want
    cache_salt: str
    stream: bool
    repeat_prompt: bool
    return_stats: bool


@dataclass(frozen=True)
class JobBuilder:
    """What jobs are checked against: the deployment and the target's checkpoint.

    streams: whether this Triton model can send more than one response.
    """

    config: ServingConfig
    checkpoint: Checkpoint
    drafters: frozenset[str]
    streams: bool = True

    def __post_init__(self) -> None:
        try:
            self.build(Given({"input_ids": [0]}))
        except RequestError as error:
            raise ConfigError(f"default_speculation: {error}") from None

    def build(self, given: Given) -> Job:
        """Return the job that a request asks for; raises RequestError for the first thing that is wrong."""
        text, prompt = self._prompt(given)
        prediction = self._prediction(given)
        method = self._plan(given, bool(prediction))
        limits = self._limits(given, len(prompt), method.config.max_nodes)
        check_size("cache_salt", given.get("cache_salt", ""), MAX_SALT_BYTES)
        return Job(
            prompt=prompt,
            prompt_text=text,
            sampling=sampling_of(given),
            stop=self._stop(given, limits.max_tokens),
            plan=method,
            prediction=prediction,
            limits=limits,
            want=Want(logprobs=given.get("return_log_probs", False)),
            cache_salt=given.get("cache_salt", ""),
            stream=self._stream(given),
            repeat_prompt=not given.get("exclude_input_in_output", True),
            return_stats=given.get("return_stats", False),
        )

    def _prompt(self, given: Given) -> tuple[str, list[int]]:
        text, ids = given.get("text_input", ""), given.get("input_ids", [])
        if text and ids:
            raise RequestError("text_input and input_ids exclude each other; send one of them")
        check_size("text_input", text, MAX_TEXT_BYTES)
        if ids:
            self._check_ids("input_ids", ids)
            return self.checkpoint.tokenizer.decode(ids), ids
        ids = self.checkpoint.tokenizer.encode(text).ids
        if not text or not ids:
            raise RequestError("the prompt is empty; text_input or input_ids must hold at least one token")
        self._check_ids("text_input", ids)  # a tokenizer may know more than the model
        return text, ids

    def _check_ids(self, name: str, ids: list[int]) -> None:
        for token in ids:
            if not 0 <= token < self.checkpoint.vocab_size:
                raise RequestError(
                    f"{name} must hold ids in 0..{self.checkpoint.vocab_size - 1}, got {token} (input {name})"
                )

    def _limits(self, given: Given, prompt_len: int, max_nodes: int) -> Limits:
        room = self.checkpoint.max_positions - prompt_len
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, at most {self.checkpoint.max_positions - 1} allowed "
                "(context of the target)"
            )
        largest = min(room, self.config.max_tokens_limit)
        default = min(self.config.default_max_tokens, largest)
        max_tokens = given.get("max_tokens", default)
        if not 1 <= max_tokens <= largest:
            raise RequestError(
                f"max_tokens must be in 1..{largest} behind a prompt of {prompt_len} tokens, "
                f"got {max_tokens} (input max_tokens)"
            )
        return Limits(max_tokens, self.checkpoint.max_positions, min(max_nodes, self.config.max_nodes))

    def _stop(self, given: Given, max_tokens: int) -> StopRule:
        words, ids = given.get("stop_words", []), given.get("stop_ids", [])
        check_words("stop_words", words)
        self._check_ids("stop_ids", ids)
        # A negative end_id is how TensorRT-LLM's clients say "never stop at EOS".
        eos = frozenset({given.get("end_id", 0)}) if "end_id" in given else self.checkpoint.eos_ids
        return StopRule(max_tokens, eos.union(ids), tuple(words))

    def _prediction(self, given: Given) -> tuple[int, ...]:
        """Return the ids that the client expects, empty when it says nothing."""
        text, ids = given.get("draft_text", ""), given.get("draft_input_ids", [])
        if text and ids:
            raise RequestError("draft_text and draft_input_ids exclude each other; send one of them")
        check_size("draft_text", text, MAX_TEXT_BYTES)
        name = "draft_text" if text else "draft_input_ids"
        ids = self.checkpoint.tokenizer.encode(text, add_special_tokens=False).ids if text else ids
        if len(ids) > self.checkpoint.max_positions:
            raise RequestError(
                f"{name} has {len(ids)} tokens, at most {self.checkpoint.max_positions} allowed (context of the target)"
            )
        self._check_ids(name, ids)
        return tuple(ids)

    def _plan(self, given: Given, predicted: bool) -> Plan:
        """Return the method: the one asked for, else `predicted` for a prediction, else the deployment's default."""
        method = given.get("speculation", "") or (PREDICTED if predicted else self.config.default_speculation)
        if method == PREDICTED and not predicted:
            raise RequestError("method 'predicted' needs what to expect: draft_text or draft_input_ids")
        if predicted and method != PREDICTED:
            raise RequestError(
                f"draft_text and draft_input_ids are for the method {PREDICTED!r}, got {method!r} (input speculation)"
            )
        config = given.get("speculation_config", "")
        drafts = given.get("num_draft_tokens", 0)
        check_range("num_draft_tokens", drafts, 0, self.config.max_nodes)
        return plan(method, config, self.drafters, {"draft_len": drafts} if drafts else {})

    def _stream(self, given: Given) -> bool:
        if given.get("stream", False) and not self.streams:
            raise RequestError(
                "stream must be false here: this model sends one response; use the model 'speculative' (input stream)"
            )
        return bool(given.get("stream", False))

    def timeout_ms(self, given: Given) -> int:
        """Return how long the request may take, its wait in the queue included."""
        timeout_ms: int = given.get("timeout_ms", 0)
        check_range("timeout_ms", timeout_ms, 0, MAX_TIMEOUT_MS)
        return timeout_ms or self.config.request_timeout_ms


def sampling_of(given: Given) -> Sampling:
    """Return the sampling that a request asks for; none of its inputs set means greedy.

    top_k ≤ 0 and top_p 0 or 1 are off. Without a temperature, top_k > 1 or 0 < top_p < 1 mean temperature 1.
    An unseeded request draws its own seed.
    """
    top_k, top_p = given.get("top_k", 0), given.get("top_p", 1.0)
    min_p = given.get("min_p", 0.0)
    check_range("top_p", top_p, 0.0, 1.0)
    check_range("min_p", min_p, 0.0, 1.0)
    draws = top_k > 1 or 0.0 < top_p < 1.0
    temperature = given.get("temperature", 1.0 if draws else 0.0)
    check_range("temperature", temperature, 0.0, 100.0)
    name = "seed" if "seed" in given else "random_seed"
    seed = given.get(name)
    if seed is not None and not 0 <= seed < 1 << 64:
        raise RequestError(f"{name} must be in 0..2^64 - 1, got {seed} (input {name})")
    return Sampling(
        temperature,
        top_k=max(top_k, 0),
        top_p=top_p or 1.0,
        min_p=min_p,
        seed=secrets.randbits(64) if seed is None else seed,
    )
