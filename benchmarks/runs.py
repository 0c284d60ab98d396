"""`python -m benchmarks.runs`: tokens per second of methods and their settings in one process, without the server.

The engine runs the steps as it does in the Triton model `target`, with the deployment's drafters in the same
process. The settings take turns on each prompt, and under `coupled` every text must equal that of the first setting.
With --users, as many users share the passes: each streams one text after another, behind cached prompts, while the
settings take turns every few seconds. What Triton, the loop and a client cost is not included: `make bench` and
`make load` measure it.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

from benchmarks.deployment import CONFIG
from benchmarks.traffic import read_prompts
from orchestrator.core.context import Context
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import load_config
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import ServingError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.run import RunOptions, TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Step
from orchestrator.core.sampling_params import OUR_RULES, Rule, Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import StepOptions
from orchestrator.drafting.registry import select_method
from orchestrator.drafting.sources import RunProposers
from runtime.engine.build_engines import build_target
from runtime.engine.local_drafters import load_drafters
from runtime.engine.runs import Runs

LIMIT_S = 60.0
SETTINGS = ("none", "auto", "suffix", "draft_model", "medusa", "redrafter", "eagle", "eagle2", "eagle3")
#: The tasks of the README's table.
TASKS = ("completion", "edit", "docstring")


@dataclass
class Tally:
    """What a setting has done, without the first call of each text."""

    num_tokens: int = 0
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add what another tally has counted."""
        self.num_tokens, self.seconds = self.num_tokens + other.num_tokens, self.seconds + other.seconds
        self.steps += other.steps

    def row(self, name: str, base: Tally) -> str:
        """Return the setting's row of the table; base: the tally of the first setting."""
        count, rate = len(self.steps), self.num_tokens / self.seconds
        mean = {
            "tokens": sum(step.acceptance.num_tokens for step in self.steps) / count,
            "nodes": sum(step.proposal.tree.num_nodes for step in self.steps) / count,
            "step": 1e3 * self.seconds / count,
            "draft": 1e3 * sum(step.draft_s for step in self.steps) / count,
            "pass": 1e-3 * sum(step.acceptance.forward_us for step in self.steps) / count,
            "shared by": sum(step.acceptance.num_in_pass for step in self.steps) / count,
        }
        cells = " | ".join(f"{value:.2f}" for value in mean.values())
        return f"| `{name}` | {rate:.0f} | {rate * base.seconds / base.num_tokens:.2f} × | {cells} |"


class Engine:
    """The target's engine with its runs and drafters, as `model_repository/target` builds it."""

    def __init__(self, config_file: str) -> None:
        config = load_config(config_file)
        self.drafters = load_drafters(config)
        engine, model = build_target(config, _no_models)
        self.runs = Runs(engine, RunProposers(config, self.drafters, engine.pass_costs))
        self.max_positions = model.max_positions
        self._numbers = itertools.count(1)

    def generate(
        self,
        prompt: Sequence[int],
        setting: str,
        sampling: Sampling,
        length: int,
        tally: Tally,
        salt: str = "",
        prediction: Sequence[int] = (),
    ) -> list[int]:
        """Return a text of `length` tokens, and add it to a setting's tally.

        salt: requests with the same salt share the cached prompts; without one, the prompt is not cached. prediction:
        the output that the client expects.
        """
        method, _, config = setting.partition(":")
        plan = select_method(method, config, frozenset(self.drafters), {})
        limits = Limits(length, self.max_positions, min(plan.config.max_nodes, MAX_NODES))
        run = RunOptions(method, plan.config_json, limits, prediction=tuple(prediction))
        number, context = next(self._numbers), Context(prompt)
        first = delta_of(context, 0, number, salt or str(number))
        request = StepRequest(first, TokenTree.bare(), sampling, StepOptions(), int(1000 * LIMIT_S), (), run)
        self._commit(context, self._call(request))
        num_before, began_s = len(context), time.perf_counter()
        while len(context.output) < length:
            tally.steps += self._commit(context, self._call(TakeSteps(number, len(context))))
        tally.seconds += time.perf_counter() - began_s
        tally.num_tokens += len(context) - num_before
        self.runs.release(number)
        return context.output

    def _commit(self, context: Context, steps: list[Step]) -> list[Step]:
        for step in steps:
            context.commit(step.tokens)
        return steps

    def _call(self, request: StepRequest | TakeSteps) -> list[Step]:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if work := self.runs.preparation(request):
            work()
        self.runs.submit(request, time.monotonic() + LIMIT_S, answers.put)
        answer = answers.get(timeout=LIMIT_S)
        if isinstance(answer, ServingError):
            raise answer
        steps: list[Step] = answer
        return steps


def _no_models(model: str) -> NoReturn:
    """Refuse to call another model: there is no server."""
    raise AssertionError(f'a deployment with engine = "torch" calls no model {model!r}')


def held_out_prompts(config_file: str, tasks: Sequence[str], num_prompts: int) -> list[list[int]]:
    """Return the ids of up to `num_prompts` held-out prompts of each task."""
    tokenizer, held_out = read_checkpoint(load_config(config_file).target).tokenizer, read_prompts()
    return [tokenizer.encode(each.text).ids for task in tasks for each in held_out[task][:num_prompts]]


def measure(engine: Engine, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> Mapping[str, Tally]:
    """Return the tally of each setting; the first round is a warm-up. Raises SystemExit if a text differs."""
    tallies = {setting: Tally() for setting in args.settings}
    texts: dict[int, list[int]] = {}
    for number in range(args.rounds + 1):
        sampling = _sampling(args, number)
        for place, prompt in enumerate(prompts):
            for setting in args.settings:
                tally = tallies[setting] if number else Tally()
                text = engine.generate(prompt, setting, sampling, args.max_tokens, tally)
                if sampling.rule is Rule.COUPLED and text != texts.setdefault(place, text):
                    sys.exit(f"prompt {place}: {setting} has another text than {args.settings[0]}")
    return tallies


def _sampling(args: argparse.Namespace, number: int = 0) -> Sampling:
    """Return the sampling of a round; under a rule whose text depends on the drafts, each round has its own seed."""
    rule = Rule(args.rule)
    return Sampling(args.temperature, seed=args.seed + (number if rule is not Rule.COUPLED else 0), rule=rule)


def measure_shared(engine: Engine, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> Mapping[str, Tally]:
    """Return the tally of each setting while `args.users` users share the passes; the first round is a warm-up."""
    tallies = {setting: Tally() for setting in args.settings}
    texts: dict[int, list[int]] = {}
    for number in range(args.rounds + 1):
        for setting in args.settings:
            tally = _window(engine, prompts, setting, args, texts)
            if number:
                tallies[setting].add(tally)
    return tallies


def _window(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    setting: str,
    args: argparse.Namespace,
    texts: dict[int, list[int]],
) -> Tally:
    """Return what all users have got of a setting in `args.seconds`; texts: those known so far, by prompt."""
    sampling, places = _sampling(args), itertools.cycle(range(len(prompts)))
    began_s, whole = time.perf_counter(), Tally()

    def stream() -> Tally:
        tally = Tally()
        while time.perf_counter() < began_s + args.seconds:
            place = next(places)
            text = engine.generate(prompts[place], setting, sampling, args.max_tokens, tally, "shared")
            if sampling.rule is Rule.COUPLED and text != texts.setdefault(place, text):
                sys.exit(f"prompt {place}: {setting} has another text than an earlier one")
        return tally

    with ThreadPoolExecutor(args.users) as users:
        for user in [users.submit(stream) for _ in range(args.users)]:
            whole.add(user.result())  # also raises what ended the user
    whole.seconds = time.perf_counter() - began_s
    return whole


def main(arguments: Sequence[str]) -> int:
    """Print a table with a row for each setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runs", description=__doc__)
    parser.add_argument("settings", nargs="*", default=SETTINGS, help='like eagle2 or eagle2:{"min_prob":0.2}')
    parser.add_argument("--config", default=str(CONFIG), help="deployment file (%(default)s)")
    parser.add_argument("--num-prompts", type=int, default=3, help="per task (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of a text (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds after the warm-up (%(default)s)")
    parser.add_argument("--users", type=int, default=0, help="requests at once; 0 = one after another (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a setting's turn with --users (%(default)s)")
    parser.add_argument("--tasks", nargs="*", default=TASKS, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    rules = [rule.value for rule in OUR_RULES]
    parser.add_argument("--rule", choices=rules, default=Rule.COUPLED.value, help="acceptance rule (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    prompts = held_out_prompts(args.config, args.tasks, args.num_prompts)
    engine = Engine(args.config)
    try:
        tallies = (measure_shared if args.users else measure)(engine, prompts, args)
    finally:
        engine.runs.close()
    base = tallies[args.settings[0]]
    print("| setting | tokens/s | × the first | tokens a step | nodes | step, ms | draft, ms | pass, ms | shared by |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for setting, tally in tallies.items():
        print(tally.row(setting, base))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
