"""`python -m benchmarks.predictions`: what a client's prediction of the output gains, by how much of it is right.

As `benchmarks.runs`, in one process without the server: the settings take turns on each prompt, greedy, each text from
a cold cache, and every text must equal that of plain decoding.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence

from benchmarks.deployment import CONFIG
from benchmarks.runs import Engine, Tally, held_out_prompts
from orchestrator.core.sampling_params import Sampling

#: What each row runs: the name, the method, and whether it is given the prediction.
SETTINGS = (
    ("none", "none", False),
    ("auto", "auto", False),
    ("auto with the prediction", "auto", True),
    ("predicted", "predicted", True),
)
TASKS = ("completion", "edit")
SAMPLING = Sampling(seed=1)
#: Replaced tokens are drawn from this many ids.
NUM_IDS = 500

Ids = Sequence[int]


def predictions(seed: int) -> dict[str, Callable[[Ids, Ids], Ids]]:
    """Return how predictions are made from a prompt and the output that it has."""
    draw = random.Random(seed)

    def replaced(share: float) -> Callable[[Ids, Ids], Ids]:
        return lambda _, output: [draw.randrange(NUM_IDS) if draw.random() < share else token for token in output]

    return {
        "the output": lambda _, output: output,
        "10 % of its tokens replaced": replaced(0.1),
        "30 % of its tokens replaced": replaced(0.3),
        "the prompt": lambda prompt, _: prompt,
        "the output backwards": lambda _, output: output[::-1],
    }


def measure(
    engine: Engine, prompts: Sequence[Ids], outputs: Sequence[Ids], predict: Callable[[Ids, Ids], Ids], num_rounds: int
) -> dict[str, Tally]:
    """Return the tally of each setting; the first round is a warm-up. Raises SystemExit if a text differs."""
    predicted = [predict(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    tallies = {name: Tally() for name, *_ in SETTINGS}
    for number in range(num_rounds + 1):
        for prompt, output, prediction in zip(prompts, outputs, predicted, strict=True):
            for name, method, is_given in SETTINGS:
                tally, given = tallies[name] if number else Tally(), prediction if is_given else ()
                text = engine.generate(prompt, method, SAMPLING, len(output), tally, prediction=given)
                if text != output:
                    sys.exit(f"{name} has another text than none")
    return tallies


def main(arguments: Sequence[str]) -> int:
    """Print a row for each kind of prediction and setting; the first round of each is a warm-up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("--config", default=str(CONFIG), help="deployment file (%(default)s)")
    parser.add_argument("--num-prompts", type=int, default=4, help="per task (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of a text (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the warm-up (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the replaced tokens (%(default)s)")
    args = parser.parse_args(arguments)
    prompts = held_out_prompts(args.config, TASKS, args.num_prompts)
    engine = Engine(args.config)
    print("| prediction | setting | × plain | tokens a step |\n|---|---|---:|---:|")
    try:
        outputs = [engine.generate(prompt, "none", SAMPLING, args.max_tokens, Tally()) for prompt in prompts]
        for kind, predict in predictions(args.seed).items():
            tallies = measure(engine, prompts, outputs, predict, args.rounds)
            plain = tallies["none"]
            for name, tally in tallies.items():
                speed_up = tally.num_tokens * plain.seconds / (tally.seconds * plain.num_tokens)
                print(f"| {kind} | {name} | {speed_up:.2f} × | {tally.num_tokens / len(tally.steps):.2f} |")
    finally:
        engine.runs.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
