"""Builds what the loop needs from a request's inputs, with the checks and defaults that depend on more than one input.

They depend on the deployment, the checkpoint or several inputs; those of a single input are in `inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.deployment.capabilities import Capabilities
from orchestrator.core.deployment.checkpoint import Checkpoint
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import ConfigError, RequestError
from orchestrator.core.grammar import Grammars
from orchestrator.core.methods import names_in
from orchestrator.core.sampling_params import Rule
from orchestrator.core.types import StepOptions
from orchestrator.drafting.parameters import WHERE
from orchestrator.drafting.registry import SelectedMethod, select_method
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import MAX_SEQUENCES, RequestInputs, check_ids, check_range
from orchestrator.server.sampling_inputs import logits_options_of, sampling_of
from orchestrator.server.text import StopRule

MAX_TRACED = 512
#: What a token of text is taken for before the text is encoded.
BYTES_PER_TOKEN = 4
PREDICTED, AUTO = "predicted", "auto"


@dataclass(frozen=True)
class RequestBuilder:
    """Builds requests for one deployment and the checkpoint of its target.

    drafters: the drafters that are loaded. grammars: compiles structured output. streams: whether this Triton model can
    send more than one response. capabilities: what the target's engine can serve. default: the request of a client that
    names nothing but a prompt. Raises ConfigError if that request cannot be served.
    """

    config: ServingConfig
    checkpoint: Checkpoint
    drafters: frozenset[str]
    grammars: Grammars
    streams: bool = True
    capabilities: Capabilities = field(default_factory=Capabilities)
    default: GenerationRequest = field(init=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "default", self.build(RequestInputs(input_ids=(0,))))
        except RequestError as error:
            raise ConfigError(f"default_speculation: {error}") from None

    def build(self, inputs: RequestInputs) -> GenerationRequest:
        """Return the request that these inputs describe; raises RequestError for the first thing that is wrong."""
        text, prompt = self._prompt(inputs)
        prediction = self._prediction(inputs)
        method = self._select_method(inputs, bool(prediction))
        limits = self._limits(inputs, len(prompt), method.config.max_nodes)
        self._check_generated(inputs, limits.max_tokens)
        stop = self._stop(inputs, limits.max_tokens)
        self._check_switches(inputs, limits.max_tokens)
        logits_options, served = logits_options_of(inputs, self.checkpoint, stop.ids), self.capabilities
        sampling = sampling_of(inputs, logits_options, served.default_rule, served.epsilon, served.served_temperature)
        if sampling.rule is Rule.BLOCK or not served.trees:
            method = method.as_chain()
        method.check_rule(sampling.rule)
        num_top = inputs.num_top_log_probs
        options = StepOptions(logprobs=inputs.return_log_probs or num_top > 0, num_top=num_top)
        method.check_served(served, sampling, options)
        if sampling.logits_options.grammar:
            self.grammars.check(sampling.logits_options.grammar)  # last: compiling one may take long
        return GenerationRequest(
            inputs=inputs,
            prompt=prompt,
            prompt_text=text,
            sampling=sampling,
            stop=stop,
            plan=method,
            prediction=prediction,
            limits=limits,
            options=options,
            num_sequences=self.num_sequences(inputs),
        )

    def num_sequences(self, inputs: RequestInputs) -> int:
        """Return how many sequences the request asks for; they run at the same time, and each takes a place."""
        largest = min(MAX_SEQUENCES, self.config.max_running, self.config.max_running_per_salt or MAX_SEQUENCES)
        check_range("num_return_sequences", inputs.num_return_sequences, 0, largest)
        return max(inputs.num_return_sequences, 1)

    def most_tokens(self, inputs: RequestInputs) -> int:
        """Return how many tokens a sequence of the request may come to, with its prompt; cheap, before it is checked.

        Text counts one token for each BYTES_PER_TOKEN of its bytes, since to encode it may take long.
        """
        prompt_len = len(inputs.input_ids) or -(-len(inputs.text_input.encode()) // BYTES_PER_TOKEN)
        max_tokens = self.config.default_max_tokens if inputs.max_tokens is None else max(inputs.max_tokens, 0)
        return min(prompt_len + max_tokens, self.checkpoint.max_positions)

    def timeout_ms(self, inputs: RequestInputs) -> int:
        """Return how long the request may take, including its wait in the queue.

        More than `max_timeout_ms` is cut to it, not refused: a gateway sends a limit also with requests that name none.
        """
        return min(inputs.timeout_ms or self.config.request_timeout_ms, self.config.max_timeout_ms)

    def _prompt(self, inputs: RequestInputs) -> tuple[str, list[int]]:
        """Return the prompt's text and its ids; the text may be empty if the output does not repeat it."""
        text, ids = inputs.text_input, list(inputs.input_ids)
        if text and ids:
            raise RequestError("text_input and input_ids exclude each other; send one of them")
        if ids:
            self._check_prompt_len("input_ids", len(ids))  # before each id is looked at
            check_ids("input_ids", ids, self.checkpoint.vocab_size)
            return "" if inputs.exclude_input_in_output else self.checkpoint.tokenizer.decode(ids), ids
        ids = self.checkpoint.encode(text)
        if not text or not ids:
            raise RequestError(
                "the prompt is empty; text_input or input_ids must have at least one token (input text_input)"
            )
        self._check_prompt_len("text_input", len(ids))
        check_ids("text_input", ids, self.checkpoint.vocab_size)  # a tokenizer may have more ids than the model
        return text, ids

    def _check_prompt_len(self, name: str, prompt_len: int) -> None:
        """Raise RequestError for a prompt that leaves no room for a token."""
        if prompt_len >= self.checkpoint.max_positions:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, at most {self.checkpoint.max_positions - 1} allowed "
                f"(context of the target, input {name})"
            )

    def _check_generated(self, inputs: RequestInputs, max_tokens: int) -> None:
        """Raise RequestError for earlier output that cannot be continued."""
        if len(inputs.generated_ids) > max_tokens:
            raise RequestError(
                f"generated_ids already end the output: it has {len(inputs.generated_ids)} tokens, max_tokens is "
                f"{max_tokens} (input generated_ids)"
            )
        check_ids("generated_ids", inputs.generated_ids, self.checkpoint.vocab_size)
        if inputs.generated_ids and (self.num_sequences(inputs) > 1 or not inputs.exclude_input_in_output):
            raise RequestError(
                "generated_ids continue one sequence whose prompt is not repeated: num_return_sequences must be 1 and "
                "exclude_input_in_output true (input generated_ids)"
            )

    def _prediction(self, inputs: RequestInputs) -> tuple[int, ...]:
        """Return the ids that the client expects as output; empty without a prediction."""
        text, ids = inputs.draft_text, inputs.draft_input_ids
        if text and ids:
            raise RequestError("draft_text and draft_input_ids exclude each other; send one of them")
        name = "draft_text" if text else "draft_input_ids"
        if text:
            ids = tuple(self.checkpoint.encode(text, add_special_tokens=False))
        if len(ids) > self.checkpoint.max_positions:
            raise RequestError(
                f"{name} has {len(ids)} tokens, at most {self.checkpoint.max_positions} allowed (context of the target)"
            )
        check_ids(name, ids, self.checkpoint.vocab_size)
        return ids

    def _select_method(self, inputs: RequestInputs, predicted: bool) -> SelectedMethod:
        """Return the method that the client names, or else one that uses its prediction, or else the default."""
        default = self.config.default_speculation
        method = inputs.speculation or (PREDICTED if predicted and default != AUTO else default)
        if method == AUTO and not predicted:
            method = self.capabilities.served_auto
        if PREDICTED in names_in(method) and not predicted:
            raise RequestError("method 'predicted' needs the expected output: draft_text or draft_input_ids")
        if predicted and PREDICTED not in names_in(method) and method != AUTO:
            raise RequestError(
                f"draft_text and draft_input_ids are for the methods {PREDICTED!r} and {AUTO!r}, got {method!r} "
                "(input speculation)"
            )
        draft_len = inputs.num_draft_tokens
        check_range("num_draft_tokens", draft_len, 0, self.config.max_nodes)
        if refusal := self.capabilities.method_refusal(method):
            raise RequestError(refusal)
        selected = select_method(
            method,
            inputs.speculation_config,
            self.drafters,
            {"draft_len": draft_len} if draft_len else {},
            self.capabilities.engine_method,
        )
        self._check_draft_len(selected, draft_len)
        return selected

    def _check_draft_len(self, selected: SelectedMethod, num_draft_tokens: int) -> None:
        """Raise RequestError for a draft length that the request sets and the engine would cut; defaults may be cut."""
        lengths = [(num_draft_tokens, "input num_draft_tokens")]
        for method in (selected, *selected.members):
            set_values = method.config.model_dump(include={"draft_len"}, exclude_unset=True)
            lengths += [(length, f"draft_len in {WHERE}") for length in set_values.values()]
        for length, where in lengths:
            if refusal := self.capabilities.length_refusal(length, where):
                raise RequestError(refusal)

    def _limits(self, inputs: RequestInputs, prompt_len: int, max_nodes: int) -> Limits:
        largest = min(self.checkpoint.max_positions - prompt_len, self.config.max_tokens_limit)
        max_tokens = inputs.max_tokens
        if max_tokens is None:
            max_tokens = min(self.config.default_max_tokens, largest)
        if not 1 <= max_tokens <= largest:
            raise RequestError(
                f"max_tokens must be in 1..{largest} after a prompt of {prompt_len} tokens, "
                f"got {max_tokens} (input max_tokens)"
            )
        most_nodes = min(max_nodes, self.config.max_nodes, self.capabilities.max_nodes)
        return Limits(max_tokens, self.checkpoint.max_positions, most_nodes)

    def _stop(self, inputs: RequestInputs, max_tokens: int) -> StopRule:
        check_ids("stop_ids", inputs.stop_ids, self.checkpoint.vocab_size)
        check_range("min_tokens", inputs.min_tokens, 0, max_tokens)
        special = self.checkpoint.special_tokens
        named = [special[word] for word in inputs.stop_words if word in special]  # they have no text to search
        end_ids = self._end_ids(inputs).union(inputs.stop_ids, named)
        return StopRule(max_tokens, end_ids, inputs.stop_words, inputs.min_tokens)

    def _end_ids(self, inputs: RequestInputs) -> frozenset[int]:
        """Return the ids that end a text; a negative end_id turns them off, as in TensorRT-LLM."""
        end_id = inputs.end_id
        if inputs.ignore_eos or (end_id is not None and end_id < 0):
            return frozenset()
        if end_id is None:
            return self.checkpoint.eos_ids
        check_ids("end_id", [end_id], self.checkpoint.vocab_size)
        return frozenset({end_id})

    def _check_switches(self, inputs: RequestInputs, max_tokens: int) -> None:
        """Raise RequestError for an option that this deployment, model or output length does not allow."""
        if inputs.guided_decoding_guide_type and not self.config.structured_output:
            name = "guided_decoding_guide_type"
            raise RequestError(
                f"{name} is not served here (structured_output = false in the deployment file; input {name})"
            )
        if inputs.stream and not self.streams:
            raise RequestError(
                "stream must be false here: this model sends one response; use the model 'speculative' (input stream)"
            )
        for name in ("return_steps", "stream_steps"):
            if getattr(inputs, name) and max_tokens > MAX_TRACED:
                raise RequestError(
                    f"{name} serves at most {MAX_TRACED} tokens, got max_tokens {max_tokens} (input {name})"
                )
        if inputs.stream_steps and not inputs.stream:
            raise RequestError("stream_steps needs stream; without it use return_steps (input stream_steps)")
        if inputs.stream_steps and inputs.return_steps:
            raise RequestError("stream_steps and return_steps exclude each other: both fill steps (input stream_steps)")
