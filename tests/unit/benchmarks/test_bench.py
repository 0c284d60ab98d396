"""The benchmark's arithmetic, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__, figures, picture, report, samples
from benchmarks.samples import BenchError, Run, Sample
from benchmarks.server import to_run
from benchmarks.traffic import Prompt, read_prompts, read_questions
from clients.generate import Chunk, Generation
from orchestrator.core.errors import ConfigError
from tests.support.tiny_models import make_tiny_target

RUN = Run((1, 2, 3), num_steps=2, num_accepted=1, first_token_s=0.1, decode_tokens=2, decode_s=1.0, num_drafted=4)


def taken(runner: str, prompt: str, decode_s: float, **changes: Any) -> Sample:
    """Return a sample of 2 decoded tokens."""
    return Sample(runner, "edit", prompt, 0, replace(RUN, decode_s=decode_s, **changes))


#: `fast` decodes prompt p at 4 tokens/s instead of 2, prompt q at 2 instead of 1; together 2 x.
SAMPLES = [taken("none", "p", 1.0), taken("fast", "p", 0.5), taken("none", "q", 2.0), taken("fast", "q", 1.0)]


class Scripted:
    """A runner that notes its calls in a common list."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def fits(self, prompt: Prompt) -> bool:
        return prompt.task != "long" or self.name != "b"

    def run(self, prompt: Prompt, max_tokens: int) -> Run:
        self.calls.append(f"{self.name}:{prompt.text}")
        return RUN


def test_measure_takes_turns_after_one_uncounted_run_each() -> None:
    calls: list[str] = []
    runners = [Scripted(name, calls) for name in "ab"]
    prompts = [Prompt(text, "edit", text) for text in "xy"]

    found = list(samples.measure(runners, prompts, 2, 9))

    assert calls == ["a:x", "b:x", "a:x", "b:x", "b:y", "a:y", "b:x", "a:x", "a:y", "b:y"]
    assert [f"{s.runner}:{s.prompt}" for s in found] == calls[2:]


def test_prediction_of_an_edit_is_the_rest_of_what_is_copied() -> None:
    text = "def f(a):\n    b = a\n    return b\n\n\n# the same with `a` renamed to `total`\ndef f(total):"
    assert Prompt("e", "edit", text).prediction == "\n    b = a\n    return b"
    assert Prompt("c", "completion", "def f(a):").prediction == ""
    for prompt in read_prompts()["edit"]:
        copied = prompt.text + prompt.prediction
        assert copied.count("\n") == 2 * prompt.text.split("\n\n\n# the same with")[0].count("\n") + 4, prompt.id


def test_prefix_hits_must_be_equal_for_a_prompt() -> None:
    cold = [taken(name, prompt, 1.0, num_cached_tokens=hits) for prompt, hits in (("p", 0), ("q", 16)) for name in "ab"]
    assert samples.check_prefix_hits(cold)
    assert not samples.check_prefix_hits(SAMPLES)
    with pytest.raises(BenchError, match="prompt p"):
        samples.check_prefix_hits([*cold, taken("c", "p", 1.0, num_cached_tokens=16)])


def test_rows_compare_totals_and_count_equal_texts() -> None:
    plain, fast = figures.rows([*SAMPLES, taken("fast", "q", 1.0, ids=(1, 9))], "none")

    assert (plain.runner, plain.tokens_per_s.overall, plain.speed_up.overall) == ("none", 4 / 3, 1.0)
    assert (fast.num_runs, fast.num_same_text) == (3, 2)
    assert fast.speed_up.overall == pytest.approx(6 / 2.5 / (4 / 3))
    assert fast.speed_up.quartiles == (2.0, 2.0, 2.0)
    assert fast.acceptance_interval[0] <= fast.acceptance_length <= fast.acceptance_interval[1]
    assert (fast.acceptance_length, fast.draft_acceptance_rate) == (8 / 6, 3 / 12)


def test_rate_ratio_of_texts_of_one_step_is_refused() -> None:
    with pytest.raises(BenchError, match="max-tokens"):
        figures.compare_rates([taken("none", "p", 0.0), taken("fast", "p", 0.0)], "edit", "fast", "none")


def test_interval_holds_the_ratio_and_shrinks_with_more_prompts() -> None:
    def around(count: int) -> tuple[float, float]:
        seconds = 1.0 + np.arange(count) % 4 / 4
        tokens = np.full(count, 100.0)
        return figures.interval(np.stack([tokens, seconds], 1), np.stack([tokens, np.full(count, 2.0)], 1))

    (low, high), (wide_low, wide_high) = around(64), around(8)

    assert wide_low < low < 2 / 1.375 < high < wide_high
    assert around(64) == (low, high)


def test_run_is_read_from_the_last_response() -> None:
    totals = {"num_steps": 2, "total_draft_tokens": 4, "total_accepted_draft_tokens": 1}
    stats = json.dumps({"num_cached_tokens": 0, "requests_per_pass": 1.5})
    chunks = [Chunk("a", [1], [1], 0.1, {}), Chunk("b", [2, 3], [2], 1.1, {**totals, "stats": stats})]

    assert to_run(Generation("x", chunks)) == replace(RUN, num_cached_tokens=0, requests_per_pass=1.5, histogram=(1, 1))


def test_a_step_s_time_leaves_the_first_step_out() -> None:
    (row,) = figures.rows([taken("none", "p", 3.0, num_steps=4), taken("none", "q", 2.0, num_steps=3)], "none")
    assert row.step_s == 1.0
    assert "| 1000.00 |" in report.table([row])


def test_our_fastest_is_compared_with_each_peers_fastest_and_plain_with_plain() -> None:
    peers = {"llama.cpp float32": 0.8, "llama.cpp float16": 0.25, "llama.cpp float16 draft model": 0.2, "other": 0.1}
    measured = [*SAMPLES, *(taken(name, prompt, s) for name, s in peers.items() for prompt in "pq")]

    found = figures.compare_with_peers(measured, "none", ["none", "fast"], ["llama.cpp"])

    assert [(each.runner, each.peer) for each in found] == [
        ("none", "llama.cpp float16"),
        ("fast", "llama.cpp float16 draft model"),
    ]
    assert [each.ratio.overall for each in found] == pytest.approx([0.5 / 3.0, 0.4 / 1.5])
    assert report.comparison_table(found).splitlines()[-1].startswith("| edit | fast | llama.cpp float16 draft model |")


def test_bench_refuses_sampled_peers() -> None:
    with pytest.raises(SystemExit):
        __main__.parse(["--peers", "--temperature", "0.8"])


def test_picture_has_a_bar_per_task_and_runner_and_is_the_same_file_again(tmp_path: Path) -> None:
    found = [row for row in figures.rows(SAMPLES, "none") for row in (row, replace(row, task="long"))]
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        picture.draw([*found, replace(found[-1], runner="slow")], "none", path)

    drawn = one.read_text()
    assert all(f">{word}<" in drawn for word in ("edit", "long", "fast", "slow", "speed-up over none"))
    assert ">none<" not in drawn
    assert two.read_text() == drawn


def test_questions_are_chats_by_category_and_another_layout_is_refused(tmp_path: Path) -> None:
    make_tiny_target(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "<{{ messages[0]['content'] }}>"})
    )
    file = tmp_path / "questions.jsonl"
    lines = [{"question_id": i, "category": name, "turns": ["a", "b"]} for i, name in enumerate(("math", "stem", "qa"))]
    file.write_text("\n".join(map(json.dumps, lines)))

    found = read_questions(file, str(tmp_path))

    assert {name: [prompt.text for prompt in some] for name, some in found.items()} == {
        "mt_bench": ["<a>", "<a>"],
        "qa": ["<a>"],
    }
    file.write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match="not JSON lines of question_id, category and turns: KeyError: 'category'"):
        read_questions(file, str(tmp_path))


def test_share_slower_counts_prompts_not_tokens() -> None:
    slower = [taken("fast", "p", 0.5), taken("fast", "q", 2.5)]
    assert figures.share_slower(slower, SAMPLES[::2]) == 0.5
