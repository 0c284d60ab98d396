"""From a request's inputs to a job for the loop: prompt, sampling, stops, method, limits; every default is here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError, RequestError
from orchestrator.core.methods import names_in
from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import StepOptions
from orchestrator.deployment.capabilities import Capabilities
from orchestrator.deployment.checkpoint import Checkpoint
from orchestrator.deployment.config import ServingConfig
from orchestrator.generation.loop import Limits, SequenceState
from orchestrator.generation.text import Output, StopRule
from orchestrator.generation.trace import Trace
from orchestrator.proposers.parameters import WHERE, read_object
from orchestrator.proposers.registry import SelectedMethod, select_method
from orchestrator.requests.inputs import (
    MAX_SALT_BYTES,
    MAX_TEXT_BYTES,
    RequestInputs,
    check_ids,
    check_range,
    check_size,
    check_words,
)
from orchestrator.requests.sampling_inputs import edits_of, min_tokens_of, sampling_of
from orchestrator.sampling.grammar import Grammars

MAX_CONFIG_BYTES = 65_536
MAX_TIMEOUT_MS = 86_400_000
MAX_TOP = 20
MAX_SEQUENCES = 16
MAX_TRACED = 512
PREDICTED = "predicted"


@dataclass(frozen=True)
class GenerationRequest:
    """One request, checked: nothing in it can be refused any more, but a method that lacks what it drafts from."""

    prompt: list[int]
    prompt_text: str
    sampling: Sampling
    stop: StopRule
    plan: SelectedMethod
    prediction: tuple[int, ...]
    limits: Limits
    options: StepOptions
    num_sequences: int
    cache_salt: str
    stream: bool
    repeat_prompt: bool
    return_stats: bool
    return_steps: bool

    def sampling_of(self, index: int) -> Sampling:
        """Return the sampling of the sequence `index`: the request's own but for the seed."""
        return replace(self.sampling, seed=child_seed(self.sampling.seed, index)) if index else self.sampling

    def sequence(self, index: int, tokenizer: Tokenizer) -> SequenceState:
        """Return the state with which the sequence `index` enters the loop."""
        context, sampling = Context(self.prompt), self.sampling_of(index)
        output = Output(tokenizer, self.prompt, self.stop)
        trace = Trace(context, sampling) if self.return_steps else None
        return SequenceState(context, sampling, self.limits, output, self.options, trace=trace)


@dataclass(frozen=True)
class RequestBuilder:
    """What jobs are checked against: the deployment and the target's checkpoint.

    grammars: what structured output is checked with. streams: whether this Triton model can send more than one
    response. capabilities: what the target's engine serves.
    """

    config: ServingConfig
    checkpoint: Checkpoint
    drafters: frozenset[str]
    grammars: Grammars
    streams: bool = True
    capabilities: Capabilities = field(default_factory=Capabilities)

    def __post_init__(self) -> None:
        try:
            self.build(RequestInputs({"input_ids": [0]}))
        except RequestError as error:
            raise ConfigError(f"default_speculation: {error}") from None

    def build(self, given: RequestInputs) -> GenerationRequest:
        """Return the job that a request asks for; raises RequestError for the first thing that is wrong."""
        text, prompt = self._prompt(given)
        prediction = self._prediction(given)
        method = self._select_method(given, bool(prediction))
        limits = self._limits(given, len(prompt), method.config.max_nodes)
        stop = self._stop(given, limits.max_tokens)
        self._check_structured(given)
        logits_options, rule = edits_of(given, self.checkpoint, stop.ids), self.capabilities.default_rule
        sampling = sampling_of(given, logits_options, limits.max_tokens, rule)
        method.check_rule(sampling.rule)
        options = self._want(given)
        method.check_served(self.capabilities, sampling, options)
        check_size("cache_salt", given.get("cache_salt", ""), MAX_SALT_BYTES)
        if sampling.logits_options.grammar:
            self.grammars.check(sampling.logits_options.grammar)  # last: compiling one may take long
        return GenerationRequest(
            prompt=prompt,
            prompt_text=text,
            sampling=sampling,
            stop=stop,
            plan=method,
            prediction=prediction,
            limits=limits,
            options=options,
            num_sequences=self.num_sequences(given),
            cache_salt=given.get("cache_salt", ""),
            stream=self._stream(given),
            repeat_prompt=not given.get("exclude_input_in_output", True),
            return_stats=given.get("return_stats", False),
            return_steps=self._return_steps(given, limits.max_tokens),
        )

    def _prompt(self, given: RequestInputs) -> tuple[str, list[int]]:
        text, ids = given.get("text_input", ""), given.get("input_ids", [])
        if text and ids:
            raise RequestError("text_input and input_ids exclude each other; send one of them")
        check_size("text_input", text, MAX_TEXT_BYTES)
        if ids:
            check_ids("input_ids", ids, self.checkpoint.vocab_size)
            return self.checkpoint.tokenizer.decode(ids), ids
        ids = self.checkpoint.tokenizer.encode(text).ids
        if not text or not ids:
            raise RequestError("the prompt is empty; text_input or input_ids must hold at least one token")
        check_ids("text_input", ids, self.checkpoint.vocab_size)  # a tokenizer may know more than the model
        return text, ids

    def _limits(self, given: RequestInputs, prompt_len: int, max_nodes: int) -> Limits:
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
        most = min(max_nodes, self.config.max_nodes, self.capabilities.max_nodes)
        return Limits(max_tokens, self.checkpoint.max_positions, most)

    def _stop(self, given: RequestInputs, max_tokens: int) -> StopRule:
        words, ids = given.get("stop_words", []), given.get("stop_ids", [])
        check_words("stop_words", words)
        check_ids("stop_ids", ids, self.checkpoint.vocab_size)
        return StopRule(max_tokens, self._eos(given).union(ids), tuple(words), min_tokens_of(given, max_tokens))

    def _eos(self, given: RequestInputs) -> frozenset[int]:
        """Return the ids that end a text; a negative end_id is how TensorRT-LLM's clients say "never stop at EOS"."""
        end_id = given.get("end_id")
        if given.get("ignore_eos", False) or (end_id is not None and end_id < 0):
            return frozenset()
        if end_id is None:
            return self.checkpoint.eos_ids
        check_ids("end_id", [end_id], self.checkpoint.vocab_size)
        return frozenset({end_id})

    def _want(self, given: RequestInputs) -> StepOptions:
        num_top = given.get("num_top_log_probs", 0)
        check_range("num_top_log_probs", num_top, 0, MAX_TOP)
        return StepOptions(logprobs=given.get("return_log_probs", False) or num_top > 0, num_top=num_top)

    def num_sequences(self, given: RequestInputs) -> int:
        """Return how many sequences the request wants; they run at once, and each takes a place."""
        num_sequences: int = given.get("num_return_sequences", 1)
        check_range("num_return_sequences", num_sequences, 0, min(MAX_SEQUENCES, self.config.max_running))
        return max(num_sequences, 1)

    def _prediction(self, given: RequestInputs) -> tuple[int, ...]:
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
        check_ids(name, ids, self.checkpoint.vocab_size)
        return tuple(ids)

    def _select_method(self, given: RequestInputs, predicted: bool) -> SelectedMethod:
        """Return the method: the one asked for, else `predicted` for a prediction, else the deployment's default."""
        method = given.get("speculation", "") or (PREDICTED if predicted else self.config.default_speculation)
        if PREDICTED in names_in(method) and not predicted:
            raise RequestError("method 'predicted' needs what to expect: draft_text or draft_input_ids")
        if predicted and PREDICTED not in names_in(method):
            raise RequestError(
                f"draft_text and draft_input_ids are for the method {PREDICTED!r}, got {method!r} (input speculation)"
            )
        config = given.get("speculation_config", "")
        check_size("speculation_config", config, MAX_CONFIG_BYTES)
        drafts = given.get("num_draft_tokens", 0)
        check_range("num_draft_tokens", drafts, 0, self.config.max_nodes)
        if refusal := self.capabilities.method_refusal(method):
            raise RequestError(refusal)
        chosen = select_method(
            method, config, self.drafters, {"draft_len": drafts} if drafts else {}, self.capabilities.engine_method
        )
        self._check_draft_len(config, drafts)
        return chosen

    def _check_draft_len(self, config: str, num_draft_tokens: int) -> None:
        """Refuse a length that was asked for and that the engine would cut; a method's default is cut to what fits."""
        values = read_object(config)
        parts = [values, *(part for part in values.values() if isinstance(part, dict))]
        lengths = [(part["draft_len"], f"draft_len in {WHERE}") for part in parts if "draft_len" in part]
        for length, where in [*lengths, (num_draft_tokens, "input num_draft_tokens")]:
            if refusal := self.capabilities.length_refusal(length, where):
                raise RequestError(refusal)

    def _return_steps(self, given: RequestInputs, max_tokens: int) -> bool:
        wanted: bool = given.get("return_steps", False)
        if wanted and max_tokens > MAX_TRACED:
            raise RequestError(
                f"return_steps tells of at most {MAX_TRACED} tokens, got max_tokens {max_tokens} (input return_steps)"
            )
        return wanted

    def _check_structured(self, given: RequestInputs) -> None:
        name = "guided_decoding_guide_type"
        if given.get(name, "") and not self.config.structured_output:
            raise RequestError(f"{name} is not served here (structured_output = false in serving.toml; input {name})")

    def _stream(self, given: RequestInputs) -> bool:
        if given.get("stream", False) and not self.streams:
            raise RequestError(
                "stream must be false here: this model sends one response; use the model 'speculative' (input stream)"
            )
        return bool(given.get("stream", False))

    def timeout_ms(self, given: RequestInputs) -> int:
        """Return how long the request may take, its wait in the queue included."""
        timeout_ms: int = given.get("timeout_ms", 0)
        check_range("timeout_ms", timeout_ms, 0, MAX_TIMEOUT_MS)
        return timeout_ms or self.config.request_timeout_ms
