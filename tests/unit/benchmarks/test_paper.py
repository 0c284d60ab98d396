"""The papers' experiments: the prompt layouts, the figures worked by hand, the page, and that all settings are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import __main__ as command
from benchmarks.paper import measuring
from benchmarks.paper.conversations import Conversation, Writer, read_conversations
from benchmarks.paper.experiments import EXPERIMENTS, Experiment, Published, setting, settings_of
from benchmarks.paper.figures import summary
from benchmarks.paper.measuring import Measured, Place, measure
from benchmarks.paper.page import page
from benchmarks.paper.picture import draw
from benchmarks.samples import BenchError, Run, Sample
from clients.generate import Chunk, Generation
from orchestrator.core.methods import DRAFTERS
from orchestrator.core.sampling_params import Rule
from orchestrator.drafting.registry import select_method

# Prompts


def written(folder: Path, *lines: object) -> Path:
    file = folder / "some.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_the_three_layouts_are_read(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"id": "edit-00", "task": "edit", "text": "def f"},
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        "",
        {"question_id": 241, "category": "translation", "turns": ["Übersetze"], "reference": ["x"]},
        {"question_id": "ab", "category": "math", "sub_category": "x", "multiturn": False, "turns": ["1 + 1"]},
        {"category": "rag", "turns": [{"role": "user", "content": "hello"}]},
    )
    assert read_conversations(file, 9) == [
        Conversation("edit-00", "edit", "edit", ("def f",)),
        Conversation("81", "mt_bench", "writing", ("first", "second")),
        Conversation("241", "translation", "translation", ("Übersetze",)),
        Conversation("ab", "mt_bench", "math", ("1 + 1",)),
        Conversation("some-6", "rag", "rag", ("hello",)),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: "),
        ([1], r"expected an object, got \[1\]"),
        ({"turns": []}, "turns must be a list of texts"),
        ({"turns": "hello"}, "turns must be a list of texts"),
        ({"turns": ["a", 3]}, "a turn must be a text"),
        ({"category": "x"}, "a turn must be a text"),
        ({"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}, "placeholder"),
        ({"id": "one", "text": "again"}, "two prompts with one id"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, words: str) -> None:
    file = written(tmp_path, {"id": "one", "text": "x"}, line)
    with pytest.raises(BenchError, match=words):
        read_conversations(file, 9)


# Settings


def test_every_setting_is_one_that_the_server_takes() -> None:
    names = set()
    for experiment in EXPERIMENTS:
        for each in experiment.settings:
            plan = select_method(each.method, each.parameters, frozenset(DRAFTERS), {})
            plan.check_rule(Rule(each.rule))
            names.add(each.name)
    assert len(names) == len(set(settings_of(EXPERIMENTS, DRAFTERS))) - 2  # all but plain decoding, at 0 and 1


# Figures

FAST = setting("fast", "suffix")


def run(
    lengths: list[int], decode_s: float, ids: tuple[int, ...] = (), tested: Any = (), accepted: Any = (), **more: Any
) -> Run:
    tokens = sum(lengths)
    histogram = tuple(sum(length - 1 == n for length in lengths) for n in range(max(lengths)))
    return Run(
        ids or tuple(range(tokens)), len(lengths), tokens - len(lengths), 0.1, tokens - lengths[0], decode_s,
        num_drafted=9, tested=tuple(tested), accepted=tuple(accepted), histogram=histogram, **more,
    )  # fmt: skip


def example() -> Measured:
    """Two prompts: of the first, 12 tokens in 4 steps, plain in 11; of the second the drafts are all refused."""
    places = {
        f"{name}#1": Place(Conversation(name, task, category, ("x",)), 1)
        for name, task, category in (("a", "edit", "easy"), ("b", "chat", "hard"))
    }
    samples = [
        Sample("none, T = 0", "edit", "a#1", 0, run([1] * 12, 11.0)),
        Sample("none, T = 0", "chat", "b#1", 0, run([1] * 5, 4.0)),
        Sample(
            FAST.name, "edit", "a#1", 0,
            run([1, 3, 5, 3], 5.5, tested=(3, 3, 2), accepted=(3, 3, 2), num_levels=9.0, num_timed_levels=8, step_ms={"draft": 30.0}),
        ),
        Sample(
            FAST.name, "chat", "b#1", 0,
            run([1] * 5, 8.0, ids=(9,) * 5, tested=(4,), accepted=(0,), num_levels=4.0, num_timed_levels=4, step_ms={"draft": 15.0}),
        ),
    ]  # fmt: skip
    return Measured((FAST.base, FAST), samples, places)


def test_a_summary_worked_by_hand() -> None:
    found = summary(example(), FAST)
    assert found.acceptance_length == pytest.approx(17 / 9) and found.accepted_per_step == pytest.approx(8 / 9)
    assert found.alpha == pytest.approx(8 / 12) and found.gamma == pytest.approx(13 / 9)
    # 30 ms in each of 3 timed steps and 15 ms in each of 4, over the 12 levels of these steps; a plain step takes 15 s / 15 = 1 s.
    assert found.c == pytest.approx((90 + 60) / 12 / 1000)
    alpha, gamma, c = found.alpha, found.gamma, found.c
    assert found.predicted == pytest.approx((1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1)))
    assert found.best_gain >= found.predicted and found.best_gamma > 3
    assert found.speed_up and found.speed_up.overall == pytest.approx((15 / 13.5) / (15 / 15))
    assert found.slower == 0.5 and (found.num_same_text, found.num_prompts) == (1, 2)
    assert found.by_depth == pytest.approx((3 / 7, 1.0, 1.0))
    assert found.histogram == pytest.approx((6 / 9, 0.0, 2 / 9, 0.0, 1 / 9))


# The run and the page


class Server:
    """Answers with numbered texts, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def generate(self, client: Any, prompt: str, **options: Any) -> Generation:
        self.asked.append((prompt, options))
        totals = {"num_steps": 1, "total_draft_tokens": 0, "total_accepted_draft_tokens": 0, "stats": "{}"}
        return Generation("x", [Chunk(f"<{len(self.asked)}>", [7], [1], 0.1, totals)])


def test_all_settings_continue_plain_decoding_s_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setattr("benchmarks.server.generate", server.generate)
    settings = settings_of([Experiment("e", "E", (FAST, setting("hot", "suffix", 1.0)), (), "")], ())
    measured = measure(None, settings, [Conversation("c", "t", "k", ("one", "two", "three"))], Writer(), 9, 5)
    assert [each.name for each in settings] == ["none, T = 0", "none, T = 1", FAST.name, "hot, T = 1, rejection"]
    assert len(server.asked) == 4 + 12 and len(measured.samples) == 12  # a warm-up each
    assert len({options["cache_salt"] for _, options in server.asked}) == 16
    by_temperature: dict[Any, list[str]] = {}
    for prompt, options in server.asked[4:]:
        by_temperature.setdefault(options.get("temperature"), []).append(prompt)
        assert options.get("rule") in ((None,) if "temperature" not in options else ("coupled", "rejection"))
    for prompts in by_temperature.values():
        assert len(set(prompts)) == 3 and all(prompts.count(prompt) == 2 for prompt in prompts)
        assert prompts[-1].count("<") == 2 and prompts[-1].endswith("three")


def test_the_page_has_the_paper_s_figures_beside_ours_and_names_what_was_not_run(tmp_path: Path) -> None:
    measured = example()
    experiment = Experiment(
        "e", "An experiment", (FAST, setting("slow", "medusa")), (Published("α", "0.5", "arXiv:1"),), "Because.", True
    )
    text = page([experiment], measured, {"cpu": "one"})
    assert "| fast, T = 0 | 1.89 (" in text and "| α | 0.5 | arXiv:1 |" in text and "Because." in text
    assert "lacks the drafter: slow, T = 0" in text and "| setting | easy | hard |" in text
    assert "| chat | 1 | fast, T = 0 | 1 | 1.00 |" in text and "2 conversations with 2 turns" in text
    draw([summary(measured, FAST)], tmp_path / "paper.svg")
    assert "accepted drafts a step" in (tmp_path / "paper.svg").read_text()


def test_the_command_says_what_is_wrong_before_it_starts_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def never(args: Any) -> Iterator[str]:
        pytest.fail("a server was started")
        yield ""

    monkeypatch.setattr(command, "serving", never)
    assert command.main(["--prompts", str(tmp_path / "none.jsonl")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert measuring.Place(Conversation("a", "t", "c", ("x",)), 2).prompt_id == "a#2"
