"""Exactness on the real server, in float64: 0 differences, and proof that there was something to get wrong.

The full size is `make exact` (tests/exact.py); this is the small one: a prompt of each task × 16 tokens per method,
whose settings take turns over the prompts.
"""

from collections.abc import Iterator

import pytest

from auditor.settings import SETTINGS
from benchmarks.deployment import CONFIG, serving, settled_metrics
from benchmarks.traffic import mixed_prompts
from launcher import Server
from orchestrator.core.deployment.config import load_config
from tests.support.client_pool import ClientPool, ask
from tests.support.exactness import SAMPLINGS
from tests.support.suite import ALONE, AT_ONCE, Row, Suite, by_method

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_PROMPTS, NUM_TOKENS = 5, 16
#: So many tokens that the passes before all requests have come, and after the first have ended, weigh little.
NUM_EQUAL, NUM_EQUAL_TOKENS = 16, 128
TURNS = by_method()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("float64") as running:
        yield running


@pytest.fixture(scope="module")
def rows(server: Server) -> dict[str, Row]:
    suite = Suite(load_config(CONFIG), mixed_prompts(NUM_PROMPTS), NUM_TOKENS, "float64", turns=TURNS)
    answers = [suite.run(unit, server.grpc_url) for unit in suite.units]
    return {row.name: row for row in suite.judge(answers)}


def accepted(row: Row, tasks: tuple[str, ...] = ()) -> int:
    """Return the accepted draft tokens of a row, for some tasks or all."""
    return sum(answer.num_accepted for case, answer in row.answers if not tasks or case.prompt.task in tasks)


@pytest.mark.parametrize("mode", [ALONE, AT_ONCE])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_text_under_any_method_is_the_targets_own(rows: dict[str, Row], sampling: str, setting: str, mode: str) -> None:
    row = rows[f"{sampling}, {setting}, {mode}"]

    turn = next(turn for turn in TURNS if setting in turn)
    assert len(row.answers) == len(range(turn.index(setting), NUM_PROMPTS, len(turn)))
    assert not row.differences, "\n".join(map(str, row.differences))


@pytest.mark.parametrize("turn", [turn for turn in TURNS if turn != ["none"]], ids=lambda turn: turn[0])
def test_drafts_were_accepted_and_refused_so_that_the_law_was_at_stake(rows: dict[str, Row], turn: list[str]) -> None:
    both = [rows[f"{sampling}, {setting}, {ALONE}"] for sampling in SAMPLINGS for setting in turn]
    drafted = sum(answer.num_drafted for row in both for _, answer in row.answers)

    assert 0 < sum(map(accepted, both)) < drafted


def test_prompt_lookup_has_drafts_accepted_where_text_repeats(rows: dict[str, Row]) -> None:
    turn = next(turn for turn in TURNS if "prompt_lookup" in turn)

    assert sum(accepted(rows[f"greedy, {setting}, {ALONE}"], ("edit", "repetitive")) for setting in turn) > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_requests_at_once_share_passes_and_requests_alone_do_not(rows: dict[str, Row], sampling: str) -> None:
    for setting in SETTINGS:
        alone, at_once = (rows[f"{sampling}, {setting}, {mode}"].answers for mode in (ALONE, AT_ONCE))

        assert all(answer.num_in_pass == 1 for _, answer in alone)
        assert sum(answer.num_in_pass for _, answer in at_once) / len(at_once) > 1.5


def test_sixteen_equal_requests_fill_most_passes(server: Server) -> None:
    """Counted, not timed: what the requests saw and what the engine counted, with prefill and tail."""
    prompt = mixed_prompts(1)[0].text
    options = {"speculation": "none", "max_tokens": NUM_EQUAL_TOKENS, "timeout_ms": 600_000, "limit_s": 600}
    before = settled_metrics(server)

    answers = ClientPool(server.grpc_url, NUM_EQUAL).map(
        lambda client, number: ask(client, prompt, **options), range(NUM_EQUAL)
    )

    after = settled_metrics(server)
    passes, requests = (
        after["target", family] - before["target", family] for family in ("passes_total", "pass_requests_total")
    )
    seen = sum(answer.num_in_pass for answer in answers) / NUM_EQUAL
    print(f"16 equal requests: a step saw {seen:.1f} in its pass, {requests / passes:.1f} a pass by the engine's count")
    assert len({tuple(answer.ids) for answer in answers}) == 1
    assert requests >= NUM_EQUAL * len(answers[0].ids)
    assert seen >= NUM_EQUAL / 2
    assert requests / passes >= NUM_EQUAL / 2
