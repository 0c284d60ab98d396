"""What steps cost: the cost model of a request, and the meter and the ledger of one that is measured against plain decoding."""

from __future__ import annotations

import pytest

from orchestrator.core.cost_model import Curve, PassCosts
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.step_costs import MAX_ENTERED, PLAIN, StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, PassLoad
from orchestrator.drafting.ledger import GRACE_STEPS, LONGEST_REST, LOSS, Ledger, Meter
from tests.support.replays import Clock


def resting(draft_s: float) -> list[int]:
    """Lengths of the rests of a request of which nothing can be drafted; plain steps run together take 1 each, a single one 1.5."""
    clock = Clock()
    costs = StepCosts(clock)
    for _ in range(40):
        costs.observe_plain(1, 1.0)
        costs.observe(1, 1, 1, 1.5)
    meter, lengths = Meter(costs), list[int]()
    for _ in range(12):
        meter.begin(1)
        clock.now_s += draft_s
        meter.end(Proposal.empty(), first_rest=1)
        lengths.append(meter.num_plain)
        clock.now_s += 0.5 + 1.0 * max(lengths[-1], 1)
        for _ in range(max(lengths[-1], 1)):
            meter.observe(TokenTree.bare(), Acceptance((), 1))
    return lengths


def test_where_nothing_pays_plain_steps_run_together_ever_more_of_them() -> None:
    lengths = resting(0.05)
    assert lengths[:7] == [0, 1, 2, 4, 8, 16, 16]
    assert min(lengths[6:]) >= 16


def test_a_draft_ends_the_rests() -> None:
    costs = StepCosts(Clock())
    for _ in range(40):
        costs.observe_plain(1, 1.0)
        costs.observe(1, 1, 1, 1.5)
    meter, drafted, lengths = Meter(costs), Proposal.chain([1], "suffix"), list[int]()
    for proposal in [Proposal.empty()] * 4 + [drafted] + [Proposal.empty()] * 2:
        meter.begin(1)
        meter.end(proposal, first_rest=1)
        lengths.append(meter.num_plain)
        for _ in range(max(lengths[-1], 1)):
            meter.observe(proposal.tree, Acceptance((), 1))
    assert lengths == [0, 1, 2, 4, 0, 1, 2]


def test_no_rest_is_made_where_looking_for_a_draft_costs_nothing() -> None:
    costs = StepCosts(Clock())
    for _ in range(40):
        costs.observe_plain(1, 1.0)
    meter = Meter(costs)
    for _ in range(20):
        meter.begin(1)
        meter.end(Proposal.empty(), first_rest=1)
        assert not meter.num_plain
        meter.observe(TokenTree.bare(), Acceptance((), 1))


def test_a_ledger_in_debt_pauses_and_pauses_longer_the_next_time() -> None:
    ledger, pauses = Ledger(), []
    for _ in range(400):
        if ledger.pause:
            ledger.rest(1)
        else:
            ledger.observe(1, 2.0, 1.0)
        pauses.append(ledger.pause)
    lengths = [len(part) for part in "".join("x" if p else " " for p in pauses).split()]
    assert len(lengths) >= 3
    assert lengths[1] > lengths[0]
    assert lengths[2] > lengths[1]


def test_looks_for_drafts_that_find_none_stay_within_the_loss_and_do_not_hinder_a_good_draft() -> None:
    ledger, lost_s, elapsed_s = Ledger(), 0.0, 0.0
    while elapsed_s < 6000.0:
        ledger.begin_rest(16, 0.3, 1.0)
        lost_s, elapsed_s, num_steps = lost_s + 0.3, elapsed_s + 0.3 + ledger.pause, ledger.pause
        while ledger.pause:
            ledger.rest(1, float(num_steps) if ledger.pause == 1 else 0.0)
        ledger.observe(3, 2.5, 1.0)
        lost_s, elapsed_s = lost_s - 0.5, elapsed_s + 2.5
        assert not ledger.pause
        ledger.observe(1, 1.5, 1.0)
        lost_s, elapsed_s = lost_s + 0.5, elapsed_s + 1.5
    assert lost_s <= LOSS * elapsed_s + 12 * GRACE_STEPS


@pytest.mark.parametrize("look_s", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("single_s", [1.05, 1.2, 1.5])
def test_a_text_without_a_draft_is_as_fast_as_plain_decoding(single_s: float, look_s: float) -> None:
    """Steps run together take 1 each, one run alone single_s, and each look for a draft look_s."""
    clock = Clock()
    meter, num_steps = Meter(StepCosts(clock)), 0
    while num_steps < 6400:
        clock.now_s += look_s if meter.begin(1) else 0.0
        meter.end(Proposal.empty(), first_rest=1)
        together = min(max(meter.num_plain, 1), LONGEST_REST)
        clock.now_s += single_s - 1.0 + together
        for _ in range(together):
            meter.observe(TokenTree.bare(), Acceptance((), 1))
        num_steps += together
    assert clock.now_s <= 1.025 * num_steps * (LONGEST_REST + single_s - 1.0) / LONGEST_REST


def test_costs_are_interpolated_between_what_was_measured_and_never_fall() -> None:
    costs = StepCosts(Clock())
    assert costs.cost_model() is None
    for _ in range(400):
        costs.observe_plain(1, 1.0)
        costs.observe(5, 1, 1, 3.0)
        costs.observe(9, 1, 1, 2.0)
    model = costs.cost_model()
    assert model
    assert model.seconds[:5].tolist() == pytest.approx([1.0, 1.375, 1.75, 2.125, 2.5], abs=0.1)
    assert model.seconds[8] == model.seconds[4]
    assert model.others_tokens == pytest.approx(0.0)


def test_a_step_that_was_held_up_hardly_changes_its_cost() -> None:
    costs = StepCosts(Clock())
    for _ in range(40):
        costs.observe_plain(1, 1.0)
    costs.observe(1, 1, 1, 500.0)
    for _ in range(16):
        costs.observe_plain(1, 1.0)
    model = costs.cost_model()
    assert model
    assert model.seconds[0] < 1.12


def test_a_size_that_was_slow_once_becomes_cheaper_until_it_is_tried_again() -> None:
    costs, seen = StepCosts(Clock()), []
    for _ in range(40):
        costs.observe_plain(1, 1.0)
        costs.observe(16, 1, 1, 2.0)
    costs.observe(8, 1, 1, 6.0)
    for _ in range(12):
        for _ in range(50):
            costs.observe_plain(1, 1.0)
            costs.observe(16, 1, 1, 2.0)
        model = costs.cost_model()
        assert model
        seen.append(float(model.seconds[7]))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 2.1


def measured(row_s: float) -> StepCosts:
    """Return the costs of an engine of which a plain pass took 1 at load, and each further row row_s."""
    return StepCosts(Clock(), PassCosts(Curve.measured([1, 128], [1.0, 1.0 + 127 * row_s])))


def test_what_was_measured_at_load_is_known_before_any_step() -> None:
    costs = measured(0.2)
    model = costs.cost_model()
    assert model and not costs.wants_plain
    assert model.seconds[:3].tolist() == pytest.approx([1.0, 1.2, 1.4])
    assert model.rate_to_beat == pytest.approx(1.0)


@pytest.mark.parametrize("costs", (measured(0.2), StepCosts(Clock())), ids=("measured", "learnt"))
def test_a_machine_that_becomes_slower_leaves_the_sizes_that_are_not_tried_their_part(costs: StepCosts) -> None:
    """Of 1, 6 and 16 rows the last is measured on the quick machine alone; it was taken to be cheap from then on."""
    for _ in range(100):
        for num_rows in (1, 6, 16):
            costs.observe_native(num_rows, 1, 1, 0.8 + 0.2 * num_rows, None)
    for _ in range(60):
        for num_rows in (1, 6):
            costs.observe_native(num_rows, 1, 1, 2 * (0.8 + 0.2 * num_rows), None)
    model = costs.cost_model()
    assert model
    assert model.seconds[15] / model.seconds[0] > 3.0  # 4 by now, and 2 by the times alone
    assert model.seconds[5] == pytest.approx(4.0, rel=0.1)


def test_what_steps_show_corrects_what_was_measured_at_load() -> None:
    costs = measured(0.2)
    for _ in range(400):
        costs.observe_native(1, 1, 1, 1.0, None)
        costs.observe_native(4, 1, 1, 3.0, None)
    model = costs.cost_model()
    assert model
    assert 1.9 < model.seconds[3] / model.seconds[0] < 3.0


def with_contexts() -> StepCosts:
    """Return the costs of an engine whose passes took 1 and 0.1 a row, and 0.01 and 0.001 a row for each token behind."""
    return StepCosts(Clock(), PassCosts(Curve.measured([1, 128], [1.1, 13.8]), 0.01, 0.001))


def load_of(context_lens: list[int], num_rows: int) -> tuple[PassLoad, float]:
    """Return the load of a pass in which each request has so many rows, and what it takes by `with_contexts`."""
    count, num_kv_tokens = len(context_lens), sum(context_lens)
    sizes = count * num_rows, count, float(num_rows), 1.0, False, num_kv_tokens, num_rows * num_kv_tokens
    return PassLoad(*sizes), 1.0 + 0.1 * count * num_rows + (0.01 + 0.001 * num_rows) * num_kv_tokens


def test_a_long_context_makes_every_pass_dearer_and_every_row() -> None:
    costs = with_contexts()
    short, long = costs.cost_model(), costs.cost_model(640)
    assert short and long
    assert short.seconds[[0, 9]].tolist() == pytest.approx([1.1, 2.0])
    assert long.seconds[[0, 9]].tolist() == pytest.approx([1.1 + 640 * 0.011, 2.0 + 640 * 0.02])
    assert (short.row_s[0], long.row_s[0]) == pytest.approx((0.1, 0.1 + 0.64))
    assert 1.0 / long.rate_to_beat == pytest.approx(long.seconds[0])


def test_passes_behind_long_contexts_teach_nothing_of_the_rows() -> None:
    """Taken for slow passes, they would make the machine look eight times as slow to a request with a short context."""
    costs = with_contexts()
    for number in range(200):
        load, seconds = load_of([640], 1 + 3 * (number % 2))
        costs.observe_native(load.num_rows, 1, 1, seconds, load)
    model = costs.cost_model()
    assert model
    assert model.seconds[[0, 3, 9]].tolist() == pytest.approx([1.1, 1.4, 2.0], rel=0.01)


def test_the_contexts_of_the_others_are_part_of_the_pass() -> None:
    costs = with_contexts()
    for _ in range(200):
        load, seconds = load_of([640] * 4, 1)
        costs.observe_native(1, 4, 1, seconds, load)
    model = costs.cost_model(640)
    assert model
    assert model.seconds[0] == pytest.approx(load_of([640] * 4, 1)[1], rel=0.01)
    assert model.row_s[0] == pytest.approx(0.1 + 0.64, rel=0.01)


@pytest.mark.parametrize("num_short", (1, 3))
def test_requests_with_short_and_long_contexts_agree_on_what_their_pass_costs(num_short: int) -> None:
    costs, context_lens = with_contexts(), [1920, *[128] * num_short]
    for _ in range(200):
        load, seconds = load_of(context_lens, 1)
        costs.observe_native(1, len(context_lens), 1, seconds, load)
    models = costs.cost_model(1920), costs.cost_model(128)
    assert [model and float(model.seconds[0]) for model in models] == pytest.approx([seconds] * 2, rel=0.01)


def test_a_request_alone_does_not_pay_for_the_long_context_before_it() -> None:
    costs = with_contexts()
    for _ in range(50):
        load, seconds = load_of([1920], 1)
        costs.observe_native(1, 1, 1, seconds, load)
    model = costs.cost_model(128)
    assert model and model.seconds[0] == pytest.approx(load_of([128], 1)[1], rel=0.01)


def test_passes_of_which_another_request_drafts_are_no_plain_ones() -> None:
    costs = StepCosts(Clock())
    costs.observe_native(1, 2, 1, 1.0, PassLoad(num_rows=9, num_steps=2, mean_rows=4.5, mean_tokens=2.0))
    assert costs.wants_plain
    costs.observe_native(1, 2, 1, 1.0, PassLoad(num_rows=2, num_steps=2, mean_rows=1.0, mean_tokens=1.0))
    assert not costs.wants_plain


def test_plain_steps_are_measured_first_and_then_now_and_again() -> None:
    costs = StepCosts(Clock())
    costs.observe(4, 1, 1, 1.0)
    assert costs.cost_model() is None
    assert costs.wants_plain
    costs.observe_plain(1, 1.0)
    assert costs.cost_model()
    assert not costs.wants_plain
    for _ in range(PLAIN):
        costs.observe(4, 1, 1, 1.0)
    assert costs.wants_plain


def test_drafts_are_measured_against_plain_steps_that_run_together() -> None:
    costs = StepCosts(Clock())
    for _ in range(40):
        costs.observe_plain(1, 1.0)
        costs.observe(1, 1, 1, 1.4)
    model = costs.cost_model()
    assert model
    assert model.rate_to_beat == pytest.approx(1.0, rel=0.01)
    assert model.seconds[0] > 1.1


def test_requests_that_draft_under_load_are_measured_against_a_batch_of_plain_ones() -> None:
    costs = StepCosts(Clock())
    for _ in range(40):
        costs.observe_plain(16, 2.0)
    for _ in range(200):
        costs.observe(4, 16, 2, 8.0)
    costs.observe_plain(16, 2.0)
    model = costs.cost_model()
    assert model
    assert model.rate_to_beat > 6.0
    assert (1 + model.others_tokens) / model.seconds[0] < 6.0


def test_requests_with_a_pass_of_their_own_are_among_the_others_and_say_nothing_of_their_rows() -> None:
    costs = StepCosts(Clock())
    most = PassLoad(num_rows=15, num_steps=15, mean_rows=1.0, mean_tokens=1.0, num_in_separate_pass=1)
    few = PassLoad(num_rows=9, num_steps=1, mean_rows=9.0, mean_tokens=3.0, num_in_separate_pass=15)
    for _ in range(40):
        costs.observe_plain(16, 1.0, most)
        costs.observe(9, 16, 3, 1.0, few)
    model = costs.cost_model()
    assert model and model.others_tokens == pytest.approx(15.0)


def test_where_it_is_not_known_what_a_pass_apart_computed_nothing_is_learnt_from_its_time() -> None:
    clock = Clock()
    costs = StepCosts(clock)
    costs.observe_plain(1, 1.0)
    meter = Meter(costs)
    for num_in_separate_pass in (0, 15, 15, 15):
        meter.begin(1)
        meter.end(Proposal.empty())
        clock.now_s += 9.0
        meter.observe(TokenTree.bare(), Acceptance((), 1, num_in_pass=16, num_in_separate_pass=num_in_separate_pass))
    model = costs.cost_model()
    assert model and (model.seconds[0], model.others_tokens) == (pytest.approx(1.0), 0.0)


def test_a_rest_of_which_a_step_had_a_pass_apart_from_most_others_is_not_measured() -> None:
    clock = Clock()
    costs = StepCosts(clock)
    costs.observe_plain(4, 1.0)
    meter = Meter(costs)
    meter.observe(TokenTree.bare(), Acceptance((), 1))
    for _ in range(20):
        meter._ledger.pause = 4
        meter.begin(1)
        meter.end(Proposal.empty())
        clock.now_s += 50.0
        for number in range(4):
            meter.observe(TokenTree.bare(), Acceptance((), 1, num_in_pass=4, num_in_separate_pass=3 * (number == 1)))
    model = costs.cost_model()
    assert model and model.seconds[0] == pytest.approx(1.0)


def native_step(num_in_pass: int, pass_us: int) -> Step:
    """Return a plain step of a pass of native code over plain steps."""
    load = PassLoad(num_in_pass, num_in_pass, 1.0, 1.0)
    acceptance = Acceptance((), 1, forward_us=pass_us, num_in_pass=num_in_pass, load=load)
    return Step(Proposal.empty(), acceptance, 0.0, 9.0)


@pytest.mark.parametrize("num_steps", (1, 4, 40))
def test_a_pass_of_native_code_is_entered_once_for_all_its_requests(num_steps: int) -> None:
    """By its own time, however many steps a request is answered with: the last one was held up."""
    costs = StepCosts(Clock())
    for _ in range(100):
        steps = [*(native_step(16, 2_000_000) for _ in range(num_steps)), native_step(16, 4_000_000)]
        for _ in range(16):
            Meter(costs).observe_native(steps)
    assert costs._num_passes == 100 * (num_steps + 1)
    model = costs.cost_model()
    assert model and model.seconds[0] == pytest.approx(2.0 + 2.0 / (num_steps + 1), rel=0.1)
    assert model.others_tokens == pytest.approx(15.0)


def test_passes_are_remembered_while_requests_may_tell_of_them() -> None:
    costs = StepCosts(Clock())
    for _ in range(3):
        Meter(costs).observe_native([native_step(2, 1_000_000) for _ in range(MAX_ENTERED)])
    assert len(costs._entered) == MAX_ENTERED


def test_where_native_code_drafts_plain_steps_are_measured_by_their_passes_too() -> None:
    """A prompt of another request came in between, whose time is none of theirs."""
    clock = Clock()
    costs = StepCosts(clock)
    for _ in range(40):
        costs.observe_native(1, 1, 1, 1.0, None)
    meter = Meter(costs)
    meter.observe(TokenTree.bare(), Acceptance((), 1))
    for _ in range(40):
        meter._ledger.pause = 4
        meter.begin(1)
        meter.end(Proposal.empty())
        clock.now_s += 50.0
        for _ in range(4):
            meter.observe(TokenTree.bare(), Acceptance((), 1, forward_us=1_500_000))
    model = costs.cost_model()
    assert model and model.seconds[0] == pytest.approx(1.5, rel=0.1)
