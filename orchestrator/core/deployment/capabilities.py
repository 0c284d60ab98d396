"""What an engine can serve, declared at load, and why it cannot serve the rest.

docs/wire.md, Target wire: a target that lacks something says so, and requests that need it are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.engine_manifest import (
    EXTERNAL,
    LlmManifest,
    Manifest,
    read_llm_manifest,
    read_manifest,
)
from orchestrator.core.methods import METHODS, PROPOSED, Method, names_in
from orchestrator.core.sampling_params import DELTA, EPSILON, OUR_RULES, Rule, Sampling, as_float32
from orchestrator.core.tree import MAX_NODES
from orchestrator.core.types import StepOptions

#: Options of a request that are more than one input, or one input beyond a limit.
PENALTY_AND_BIAS, LARGE_TOP_K, MAX_TOP_K = "repetition_penalty beside logit_bias_ids", "top_k above 1024", 1024
LOGPROBS = "return_log_probs"
_REFUSED = "the target's engine does not serve"
GREEDY = "temperature 0"
SEVERAL_ENDS, LONG_BAD_WORDS = "min_tokens with several end ids", "bad_words of several tokens"
WHOLE_EPSILON = "typical_epsilon 1"


@dataclass(frozen=True)
class Capabilities:
    """What a target's engine can serve; the defaults are those of our own PyTorch engine, which serves everything.

    rules: the acceptance rules that it can apply to its logits.
    trees: it verifies trees; False = chains only.
    target_tokens, features, logprobs: whether a step may ask for them; where it may ask for target tokens, it may also
    ask for the top tokens of nodes.
    reason: why it lacks anything. lacks: {option of a request: why this one cannot be served}.
    drafts: whether it verifies drafts that the server sends. max_nodes: maximum draft nodes of a step.
    engine_method: the method with which it drafts by itself; empty = it does not.
    epsilon: ε of the rule `typical` for a request that does not set it.
    """

    rules: frozenset[Rule] = frozenset(OUR_RULES)
    trees: bool = True
    target_tokens: bool = True
    features: bool = True
    logprobs: bool = True
    reason: str = "it belongs to engines that sample by themselves"
    lacks: Mapping[str, str] = field(default_factory=dict)
    drafts: bool = True
    max_nodes: int = MAX_NODES
    engine_method: str = ""
    epsilon: float = EPSILON

    @property
    def default_rule(self) -> Rule:
        """The rule of a request that does not name one: `coupled` if served, else `engine`, else another."""
        return min(self.rules, key=[Rule.COUPLED, Rule.ENGINE, *OUR_RULES].index)

    @property
    def served_auto(self) -> str:
        """The method that serves `auto`: the engine's own if it takes no drafts from the server."""
        return "auto" if self.drafts else self.engine_method or "none"

    @property
    def served_temperature(self) -> float:
        """The temperature of a request that does not set one: 0 unless it is deployed for sampling."""
        return 1.0 if GREEDY in self.lacks else 0.0

    def method_refusal(self, method: str) -> str:
        """Return why the method cannot be served, and which engines serve it; empty = it can."""
        return next((why for name in names_in(method) if (why := self._method_refusal(name))), "")

    def _method_refusal(self, method: str) -> str:
        if method in ("none", self.engine_method) or method not in PROPOSED:
            return ""
        if self.engine_method:
            why = f"it drafts by itself, with the method {self.engine_method!r}"
        elif not self.drafts:
            why = "it was built for no drafts"
        elif METHODS[method].hidden_states and not self.features:
            why = "it keeps its hidden states to itself"
        else:
            return ""
        return f"{_REFUSED} the method {method!r}: {why}; {_served_by(method)} (input speculation)"

    def length_refusal(self, draft_len: int, where: str) -> str:
        """Return why a step cannot have `draft_len` drafts; empty = it can. where: the input that sets the number."""
        if not self.drafts or draft_len <= self.max_nodes:
            return ""
        return f"the target's engine takes at most {self.max_nodes} draft tokens a step, got {draft_len} ({where})"

    def refusal(self, sampling: Sampling, options: StepOptions, *, method: str = "", branches: str = "") -> str:
        """Return why the engine cannot serve a step or a method with this sampling and these options; empty = it can.

        method: its name, empty = any. branches: why it may propose more than a chain, empty = it does not.
        """
        what = next(self._lacking(sampling, options, method, branches), "")
        return f"{_REFUSED} {what}" if what else ""

    def _lacking(self, sampling: Sampling, options: StepOptions, method: str, branches: str) -> Iterator[str]:
        """Yield what the engine cannot serve, with the reason."""
        named = f"the method {method!r}" if method else "the step"
        other = f"; {_served_by(method, branches)}" if method else ""
        if branches and not self.trees:
            yield f"{named} with {branches}: {self.reason}{other} (input speculation_config)"
        if sampling.rule not in self.rules:
            served = ", ".join(rule.value for rule in Rule if rule in self.rules)
            yield f"the rule {sampling.rule.value!r}: {self.reason}; its own: {served} (input rule)"
        if options.target_tokens and not self.target_tokens:
            yield f"{named}, which learns from the target's tokens: {self.reason}{other} (input speculation)"
        if options.num_node_top and not self.target_tokens:
            yield f"{named}, which learns from the target's top tokens: {self.reason}{other} (input speculation)"
        if options.features_from is not None and not self.features:
            yield f"{named}, which drafts from hidden states: {self.reason}{other} (input speculation)"
        if (options.logprobs or options.num_top) and not self.logprobs:
            why = self.lacks.get(LOGPROBS, self.reason)
            yield f"log-probabilities: {why} (input {LOGPROBS})"
        yield from (f"{name}: {self.lacks[name]}" for name in options_of(sampling) if name in self.lacks)


def _served_by(name: str, branches: str = "") -> str:
    """Return which engines serve a method."""
    method = METHODS.get(name, Method(name))
    mode = EXTERNAL if method.needs_only_tokens and not branches else method.build_mode
    return f"engines built for {mode} serve it, or engine = 'torch'" if mode else "engine = 'torch' serves it"


def options_of(sampling: Sampling) -> Iterator[str]:
    """Yield the options of a request that change p, by the names of their inputs."""
    logits_options = sampling.logits_options
    sampled, is_typical = not sampling.greedy, sampling.rule is Rule.TYPICAL
    is_set = {
        "temperature": sampled,
        GREEDY: not sampled,
        "min_p": sampled and sampling.min_p > 0.0,
        "typical_p": sampled and sampling.typical_p < 1.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "min_tokens": sampling.min_tokens > 0 and bool(logits_options.end_ids),
        SEVERAL_ENDS: sampling.min_tokens > 0 and len(logits_options.end_ids) > 1,
        "logit_bias_ids": bool(logits_options.bias),
        "bad_words": bool(logits_options.bad_words),
        PENALTY_AND_BIAS: sampling.repetition_penalty != 1.0 and bool(logits_options.bias),
        LARGE_TOP_K: sampled and sampling.top_k > MAX_TOP_K,
        LONG_BAD_WORDS: any(len(word) > 1 for word in logits_options.bad_words),
        "allowed_token_ids": bool(logits_options.allowed),
        "guided_decoding_guide_type": logits_options.grammar is not None,
        WHOLE_EPSILON: is_typical and sampling.epsilon >= 1.0,
        "typical_delta": is_typical and sampling.delta != DELTA,
    }
    yield from (name for name, changes_p in is_set.items() if changes_p)


# Each step hands the executor the whole text so far as a prompt, so counts that start at the prompt's end restart.
_OUTPUT_UNKNOWN = "a step hands it the whole text as a prompt, so that it cannot tell what was output"
_LACKS = {
    "min_p": "it is not established in which order the executor applies it",
    "typical_p": "the executor has no such rule",
    "presence_penalty": _OUTPUT_UNKNOWN,
    "frequency_penalty": _OUTPUT_UNKNOWN,
    SEVERAL_ENDS: "a request of the executor names one end id",
    LONG_BAD_WORDS: _OUTPUT_UNKNOWN,
    PENALTY_AND_BIAS: "the executor adds the bias before the penalty",
    LARGE_TOP_K: "the executor cuts it to its own largest",
    "allowed_token_ids": "the executor has no such mask",
    "guided_decoding_guide_type": _OUTPUT_UNKNOWN,
}
_EDITS = ("repetition_penalty", "min_tokens", "logit_bias_ids", "bad_words")
# These modes are known to verify at temperature 0; how they treat other sampling options is not established.
_ENGINE_SIDE_LACKS = dict.fromkeys(
    ("temperature", *_EDITS, LOGPROBS), "it is not established for engines that draft by themselves"
)
# Inferred: each call counts output tokens from its own beginning.
_BACKEND_LACKS = dict.fromkeys(_EDITS, _OUTPUT_UNKNOWN) | {
    LOGPROBS: "whole vocabularies of logits would have to come from another Triton model"
}
_LLM_LACKS = _LACKS | dict.fromkeys(_EDITS, "it is not established for the LLM API")


#: What all engines that sample by themselves and take no drafts have in common.
_SAMPLING_ENGINE = Capabilities(
    rules=frozenset({Rule.ENGINE}),
    trees=False,
    target_tokens=False,
    features=False,
    logprobs=False,
    drafts=False,
    max_nodes=0,
)


def executor_capabilities(manifest: Manifest) -> Capabilities:
    """Return what TensorRT-LLM's executor can serve with a compiled engine."""
    engine_method, drafts = manifest.engine_method, manifest.mode == EXTERNAL
    takes = "verifies chains alone" if drafts else "takes no drafts"
    served = replace(
        _SAMPLING_ENGINE,
        # `rejection`: the executor also takes the drafts' probabilities.
        rules=frozenset({Rule.ENGINE, Rule.REJECTION} if drafts else {Rule.ENGINE}),
        logprobs=not engine_method,
        reason=f"TensorRT-LLM's executor samples by itself and {takes}",
        lacks=_LACKS | _ENGINE_SIDE_LACKS if engine_method else _LACKS,
        drafts=drafts,
        max_nodes=manifest.max_draft_len if drafts else 0,
        engine_method=engine_method,
    )
    epsilon = eagle_posterior(manifest)
    return _sampling_eagle(served, epsilon) if epsilon else served


def eagle_posterior(manifest: Manifest) -> float:
    """Return the ε with which an EAGLE engine is deployed for sampling, in float32; 0 = it serves temperature 0."""
    spec = manifest.plan.get("spec", {}) if manifest.mode == "eagle" else {}
    return as_float32(spec.get("eagle_posterior", 0.0))


def _sampling_eagle(served: Capabilities, epsilon: float) -> Capabilities:
    """Return what EAGLE serves with typical acceptance, which is set for the whole engine, but ε for each request."""
    lacks = {name: why for name, why in served.lacks.items() if name != "temperature"}
    lacks[GREEDY] = "this engine is deployed for sampling (key eagle_posterior of the engines' file)"
    lacks[WHOLE_EPSILON] = "TensorRT-LLM takes 0 to below 1 (input typical_epsilon)"
    lacks["typical_delta"] = "TensorRT-LLM uses the square root of typical_epsilon (input typical_delta)"
    return replace(served, rules=frozenset({Rule.TYPICAL}), lacks=lacks, epsilon=epsilon)


def backend_capabilities(manifest: Manifest) -> Capabilities:
    """Return what NVIDIA's backend can serve with a compiled engine: what the executor can, except what it counts."""
    served = executor_capabilities(manifest)
    lacks = {**served.lacks, **_BACKEND_LACKS}
    return replace(served, rules=frozenset({Rule.ENGINE}), logprobs=False, lacks=lacks)


def llm_capabilities(manifest: LlmManifest) -> Capabilities:
    """Return what the LLM API can serve: it drafts by itself, with one method, or not at all (method "none")."""
    drafts, lacks = manifest.method != "none", _LLM_LACKS
    if drafts:
        lacks = {**_LLM_LACKS, LOGPROBS: "it is not established for drafts of the LLM API"}
    if drafts and not manifest.samples:
        lacks["temperature"] = "trtllm-serve drafts for greedy requests only (sampling = true in the engines' file)"
    return replace(
        _SAMPLING_ENGINE,
        logprobs=not drafts,
        reason="TensorRT-LLM's LLM API samples by itself and takes no drafts",
        lacks=lacks,
        engine_method=manifest.method,
    )


def capabilities_of(config: ServingConfig) -> Capabilities:
    """Return what a deployment's target can serve; raises ConfigError if its engine's manifest cannot be read."""
    folder = Path(config.target)
    match config.engine:
        case "torch":
            return Capabilities()
        case "tensorrt_llm":
            return executor_capabilities(read_manifest(folder))
        case "tensorrtllm_backend":
            return backend_capabilities(read_manifest(folder))
        case "llm_api":
            return llm_capabilities(read_llm_manifest(folder))
