"""Exactness on the real server, in both placements: no difference, and proof that there was something to get wrong.

The full size is `make exact` (tests/exact.py); this is the small one: a prompt of each task × 16 tokens per method,
whose settings take turns over the prompts.
"""

import statistics

import pytest

from auditor.settings import SETTINGS
from benchmarks.deployment import CONFIG, settled_metrics
from benchmarks.traffic import mixed_prompts
from launcher import Server
from orchestrator.core.deployment.config import load_config
from tests.server.conftest import both_placements
from tests.support.client_pool import ClientPool, ask
from tests.support.exactness import SAMPLINGS
from tests.support.suite import ALONE, AT_ONCE, Row, Suite, by_method

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800), both_placements]

NUM_PROMPTS, NUM_TOKENS = 5, 16
#: So many tokens that the passes before all requests have come, and after the first have ended, weigh little.
NUM_EQUAL, NUM_EQUAL_TOKENS = 16, 128
TURNS = by_method()


@pytest.fixture(scope="module")
def rows(shipped: Server) -> dict[str, Row]:
    suite = Suite(load_config(CONFIG), mixed_prompts(NUM_PROMPTS), NUM_TOKENS, "float32", turns=TURNS)
    answers = [suite.run(unit, shipped.grpc_url) for unit in suite.units]
    return {row.name: row for row in suite.judge(answers)}


def accepted(row: Row, tasks: tuple[str, ...] = ()) -> int:
    """Return the accepted draft tokens of a row, for some tasks or all."""
    return sum(answer.num_accepted for case, answer in row.answers if not tasks or case.prompt.task in tasks)


def test_text_under_every_setting_of_every_method_is_the_targets_own(rows: dict[str, Row]) -> None:
    assert len(rows) == 2 * len(SAMPLINGS) * len(SETTINGS)
    faults = [fault for row in rows.values() for fault in row.faults]
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.parametrize("turn", [turn for turn in TURNS if turn != ["none"]], ids=lambda turn: turn[0])
def test_drafts_were_accepted_and_refused_so_that_the_law_was_at_stake(rows: dict[str, Row], turn: list[str]) -> None:
    both = [rows[f"{sampling}, {setting}, {ALONE}"] for sampling in SAMPLINGS for setting in turn]
    drafted = sum(answer.num_drafted for row in both for _, answer in row.answers)

    assert 0 < sum(map(accepted, both)) < drafted


def test_prompt_lookup_has_drafts_accepted_where_text_repeats(rows: dict[str, Row]) -> None:
    turn = next(turn for turn in TURNS if "prompt_lookup" in turn)

    assert sum(accepted(rows[f"greedy, {setting}, {ALONE}"], ("edit", "repetitive")) for setting in turn) > 0


def test_requests_at_once_share_passes_and_requests_alone_do_not(rows: dict[str, Row]) -> None:
    alone, at_once = (
        [answer.num_in_pass for row in rows.values() if row.mode == mode for _, answer in row.answers]
        for mode in (ALONE, AT_ONCE)
    )
    # The launcher's own probe of one token may share a pass with a request.
    assert statistics.median(alone) == 1 and sum(at_once) / len(at_once) > 1.5


def test_sixteen_equal_requests_fill_most_passes(shipped: Server) -> None:
    """Counted, not timed: what the requests saw and what the engine counted, with prefill and tail."""
    if "draft" in shipped.models:
        pytest.skip("in `separate` a pass has the steps that have come over BLS by then")
    prompt = mixed_prompts(1)[0].text
    options = {"speculation": "none", "max_tokens": NUM_EQUAL_TOKENS, "timeout_ms": 600_000, "limit_s": 600}
    before = settled_metrics(shipped)

    answers = ClientPool(shipped.grpc_url, NUM_EQUAL).map(
        lambda client, number: ask(client, prompt, **options), range(NUM_EQUAL)
    )

    after = settled_metrics(shipped)
    passes, requests = (
        after["target", family] - before["target", family] for family in ("passes_total", "pass_requests_total")
    )
    seen = sum(answer.num_in_pass for answer in answers) / NUM_EQUAL
    print(f"16 equal requests: a step saw {seen:.1f} in its pass, {requests / passes:.1f} a pass by the engine's count")
    assert len({tuple(answer.ids) for answer in answers}) == 1
    assert requests >= NUM_EQUAL * len(answers[0].ids)
    assert seen >= NUM_EQUAL / 2
    assert requests / passes >= NUM_EQUAL / 2
