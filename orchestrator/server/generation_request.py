"""One request as the loop needs it: prompt, sampling, stops, method, limits; built by `request_builder`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import RequestError
from orchestrator.core.messages.run import RunOptions
from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import StepOptions
from orchestrator.drafting.registry import SelectedMethod
from orchestrator.server.inputs import RequestInputs
from orchestrator.server.loop import SequenceState
from orchestrator.server.step_trace import Trace
from orchestrator.server.text import Output, StopRule


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request: only its proposer may still be refused, if the method lacks its data.

    inputs: the client's own, for what is only read from them. plan: the method that drafts. prediction: the ids that
    the client expects as output, for the method that uses them.
    """

    inputs: RequestInputs
    prompt: list[int]
    prompt_text: str
    sampling: Sampling
    stop: StopRule
    plan: SelectedMethod
    prediction: tuple[int, ...]
    limits: Limits
    options: StepOptions
    num_sequences: int

    @property
    def max_len(self) -> int:
        """Maximum tokens that a sequence may need KV slots for: prompt, output, and the drafts of a step."""
        drafts = 0 if self.plan.method == "none" else self.limits.max_nodes
        return len(self.prompt) + self.limits.max_tokens + drafts

    @property
    def run(self) -> RunOptions:
        """What the target's engine needs for a run of this request."""
        stop, plan = self.stop, self.plan
        return RunOptions(
            plan.method, plan.config_json, self.limits, stop.min_tokens, tuple(sorted(stop.ids)), self.prediction
        )

    def sampling_of(self, index: int) -> Sampling:
        """Return the sampling of the sequence `index`: the request's own, with a seed of its own."""
        return replace(self.sampling, seed=child_seed(self.sampling.seed, self.inputs.sequence_index + index))

    def sequence(self, index: int, tokenizer: Tokenizer) -> SequenceState:
        """Return the state with which the sequence `index` enters the loop.

        Raises RequestError if the tokens generated before already end the output.
        """
        context, sampling, generated = Context(self.prompt), self.sampling_of(index), self.inputs.generated_ids
        output = Output(tokenizer, self.prompt, self.stop)
        context.commit(generated)
        output.push(generated)  # the client has this text, except for what `output` still holds back
        if output.finish:
            raise RequestError(
                f"generated_ids already end the output: {output.finish.value} at token {output.num_tokens} of "
                f"{len(generated)} (input generated_ids)"
            )
        trace = Trace(context, sampling) if self.inputs.return_steps or self.inputs.stream_steps else None
        return SequenceState(context, sampling, self.limits, output, self.options, trace=trace)
