"""Runs the settings over conversations, every one on the same prompts, in turn, from a cold cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.conversations import Conversation, Writer
from benchmarks.paper.experiments import Setting
from benchmarks.samples import Sample, rotated
from benchmarks.server import Method, to_run
from benchmarks.traffic import Prompt

#: Reports progress: the number of requests done, and of all requests.
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Place:
    """Where a prompt comes from; number: of the turn, from 1 on."""

    conversation: Conversation
    number: int

    @property
    def prompt_id(self) -> str:
        """The prompt id of its samples."""
        return f"{self.conversation.id}#{self.number}"


@dataclass(frozen=True)
class Measured:
    """The samples of all settings (runner: a setting's name), and where their prompts come from, by prompt id."""

    settings: Sequence[Setting]
    samples: Sequence[Sample]
    places: Mapping[str, Place]


def measure(
    client: Any,
    settings: Sequence[Setting],
    conversations: Sequence[Conversation],
    writer: Writer,
    max_tokens: int,
    seed: int,
    report: Report = lambda done, total: None,
) -> Measured:
    """Run every setting on every turn, after one warm-up of each.

    Invariant: all settings of a temperature continue the same prompts, since the answers between two turns are those of
    plain decoding; every request has a salt of its own.
    """
    runners = {each.name: _method(client, each, seed) for each in settings}
    samples: list[Sample] = []
    places: dict[str, Place] = {}
    first = conversations[0]
    for runner in runners.values():
        runner.generate(client, Prompt(first.id, first.task, writer.prompt(first.turns[:1], [])), max_tokens)
    total = sum(len(each.turns) for each in conversations) * len(settings)
    for index, conversation in enumerate(conversations):
        for temperature in dict.fromkeys(each.temperature for each in settings):
            some = [each for each in settings if each.temperature == temperature]
            answers: list[str] = []
            for number in range(1, len(conversation.turns) + 1):
                place = Place(conversation, number)
                places[place.prompt_id] = place
                text = writer.prompt(conversation.turns[:number], answers)
                for each in rotated(some, index + number):
                    prompt = Prompt(place.prompt_id, conversation.task, text)
                    done = runners[each.name].generate(client, prompt, max_tokens)
                    samples.append(Sample(each.name, conversation.task, place.prompt_id, 0, to_run(done)))
                    if each == each.base:
                        answers.append(done.text)
                    report(len(samples), total)
    return Measured(settings, samples, places)


def _method(client: Any, each: Setting, seed: int) -> Method:
    options = {"temperature": each.temperature, "seed": seed, "rule": each.rule} if each.temperature else {}
    return Method(each.method, client, each.parameters, options)
