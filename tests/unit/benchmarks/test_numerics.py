"""The harness behind docs/numerics.md: float64 beside itself, differences that were planted, counts written by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from tests.numerics.__main__ import conditions_of, main
from tests.numerics.bench import Bench, Cells, merged
from tests.numerics.counts import EXACT, PLAIN, Tally, interval
from tests.numerics.page import Store, rate
from tests.numerics.passes import Forced, Rows, Step, chance_of_difference, compare, margin
from tests.support.exactness import SAMPLINGS
from tests.support.tiny_models import make_tiny_target

METHODS = ("none", "prompt_lookup", "made:4", "made:8", "made:24", "made:64")
TEXT, NUM_TOKENS = "abcabdabcabe" * 2, 18
PLACES = (len(TEXT) + 3, len(TEXT) + 4, len(TEXT) + 15)


class Planted(Forced):
    """Float64 with the second likeliest token before the likeliest, wherever a token of PLACES is picked."""

    def rows(self, tree: TokenTree) -> Tensor:
        logits = super().rows(tree).clone()
        for row, position in enumerate((tree.depths + len(self._sequence.ids)).tolist()):
            if position in PLACES:
                first, second = logits[row].topk(2).indices
                logits[row, second] = logits[row, first] + 0.5
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_target(tmp_path_factory.mktemp("tiny"), eos_token_id=63))


@pytest.fixture(scope="module")
def cells(folder: str) -> Cells:
    sides = {EXACT: Forced(folder, "cpu", EXACT), "again": Forced(folder, "cpu", EXACT)}
    bench = Bench(sides | {"planted": Planted(folder, "cpu", EXACT)}, folder)
    bench.run(7, TEXT, "greedy", SAMPLINGS["greedy"], METHODS, NUM_TOKENS)
    bench.run(7, TEXT, "sampled", SAMPLINGS["sampled"], ("none", "made:8"), NUM_TOKENS)
    return bench.cells


def only(cells: Cells, side: str, against: str) -> dict[str, Tally]:
    return {key[3]: t for key, t in merged(cells, (0, 1, 2, 3)).items() if key[:3] == ("greedy", side, against)}


def test_float64_beside_itself_differs_at_no_tree_size(cells: Cells) -> None:
    same = {key: tally for key, tally in cells.items() if key[1] == "again" or (key[1] == EXACT and key[2] == PLAIN)}
    assert {key[4] for key in same} >= {0, 4, 8, 24, 64}
    assert {key[2] for key in same} == {EXACT, PLAIN}
    for tally in same.values():
        assert tally.differing == tally.steps == tally.paths == tally.near == 0
        assert tally.largest < 1e-10


def test_every_token_is_counted_once_per_method(cells: Cells) -> None:
    """A tree cannot be made at the last token, so a made one may lack it."""
    counted = {method: tally.target_tokens for method, tally in only(cells, "again", EXACT).items()}
    assert counted["none"] == counted["prompt_lookup"] == NUM_TOKENS
    assert 4 * (NUM_TOKENS - 1) <= counted["made"] <= 4 * NUM_TOKENS
    assert merged(cells, (0, 1, 2))["greedy", "again", EXACT].places == NUM_TOKENS


def test_planted_differences_are_counted(cells: Cells) -> None:
    for method, tally in only(cells, "planted", EXACT).items():
        assert tally.differing == len(PLACES) * (4 if method == "made" else 1)
        assert {place for _, place, _ in tally.margins} == set(PLACES)
        assert tally.distinct == len(PLACES) and tally.largest > 0.1
        assert 0 < tally.steps <= tally.differing


def test_what_is_planted_in_every_shape_is_no_difference_to_plain_decoding(cells: Cells) -> None:
    for tally in only(cells, "planted", PLAIN).values():
        assert tally.differing == 0 and tally.largest < 1e-10


def test_sampled_picks_see_the_plant_too(cells: Cells) -> None:
    tally = merged(cells, (0, 1, 2))["sampled", "planted", EXACT]
    assert tally.differing and tally.chance > 0.5


def step_of(exact: Tensor, path: tuple[int, ...], target_tokens: list[int]) -> Step:
    tree = TokenTree(np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.int32))
    return Step(1, 10, tree, path, {EXACT: Rows(target_tokens, exact)})


@pytest.mark.parametrize(
    ("target_tokens", "differing", "paths"),
    [([1, 2, 0], 0, 0), ([1, 2, 3], 1, 0), ([1, 3, 0], 1, 1), ([0, 2, 0], 1, 1), ([0, 3, 1], 3, 1)],
)
def test_paths_differ_where_a_pick_leaves_them(target_tokens: list[int], differing: int, paths: int) -> None:
    exact = torch.randn(3, 5, dtype=torch.float64)
    step = step_of(exact, (1, 2), [1, 2, 0])
    tally = compare(step, Rows(target_tokens, exact), step.rows[EXACT], Sampling())
    assert (tally.target_tokens, tally.num_steps) == (3, 1)
    assert (tally.differing, tally.steps, tally.paths) == (differing, int(differing > 0), paths)


def test_a_pick_beyond_the_path_lengthens_it() -> None:
    """Float64 stops at the root; the other one picks a child."""
    exact = torch.randn(1, 5, dtype=torch.float64)
    step = step_of(exact, (), [0])
    assert compare(step, Rows([1], exact), step.rows[EXACT], Sampling()).paths == 1


def test_margins() -> None:
    row = np.array([[2.0, 1.5, 0.0, -9.0]])
    assert margin(row, 0, 1, 5, Sampling()) == 0.5
    rule = Sampling(1.0, top_p=0.9)
    before = np.exp(row[0, :3]).sum() / np.exp(row[0]).sum()
    assert margin(row, 0, 3, 5, rule) == pytest.approx(before - 0.9)


def test_intervals() -> None:
    assert interval(5, 100) == pytest.approx((0.02154, 0.11175), abs=1e-5)
    assert interval(100, 100) == pytest.approx((0.96301, 1.0), abs=1e-5)
    assert interval(0, 300) == (0.0, 0.01)
    assert interval(0, 2) == interval(0, 0) == (0.0, 1.0)
    assert rate(10, 1000, 100) == "10 | 1 (0.177 – 5.45)"


def test_chance_is_that_of_equal_noise() -> None:
    """The sum over j by the order of the ratios equals the plain double sum, and what is drawn."""
    torch.manual_seed(1)
    log_p, log_q = torch.randn(2, 6, 12, dtype=torch.float64)
    log_p[0, 3], log_q[:2, 5], log_q[5] = -torch.inf, -torch.inf, log_p[5]
    log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    found = chance_of_difference(log_p, log_q)
    p, q = log_p.exp(), log_q.exp()
    worse = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None]).nan_to_num(torch.inf, torch.inf)
    assert torch.allclose(found, 1 - (1 / worse.sum(-1)).sum(-1), atol=1e-12)
    noise = -(-torch.rand(40_000, 1, 12, dtype=torch.float64).log()).log()
    drawn = ((log_p + noise).argmax(-1) != (log_q + noise).argmax(-1)).double().mean(0)
    assert torch.allclose(found, drawn, atol=0.01) and found[5] < 1e-12


def test_tallies_add_up() -> None:
    left = Tally(10, 1, 4, 1, 1, 0.5, 0.1, 2, 0.3, {"-20": 9, "0": 1}, [[1, 5, 1e-5]])
    total = Tally()
    total.add(left)
    total.add(Tally(20, 1, 5, 1, 0, 0.25, 0.2, 4, 0.2, {"-20": 990}, [[1, 5, 1e-5]]))
    assert (total.target_tokens, total.differing, total.num_steps, total.steps, total.paths) == (30, 2, 9, 2, 1)
    assert (total.largest, total.distinct, total.near) == (0.3, 1, 2)
    assert total.quantile(0.5) == pytest.approx(0.1) and total.quantile(1.0) == 0.3
    assert total.expected(None) == pytest.approx(0.025) and total.expected(2.0) == pytest.approx(0.01)
    assert left.deltas == {"-20": 9, "0": 1}


def test_methods_of_one_text_are_not_counted_as_distinct_places() -> None:
    cells: Cells = {
        ("greedy", "float32", EXACT, "none", 0): Tally(target_tokens=30),
        ("greedy", "float32", EXACT, "suffix", 4): Tally(target_tokens=10),
        ("greedy", "float32", EXACT, "suffix", 8): Tally(target_tokens=25),
        ("greedy", "float32", EXACT, "made", 4): Tally(target_tokens=30),
        ("greedy", "float32", EXACT, "made", 8): Tally(target_tokens=30),
    }
    assert merged(cells, (0, 1, 2))["greedy", "float32", EXACT].places == 35
    assert merged(cells, (0, 4))["greedy", 0].places == 30


def test_pages_keep_what_other_devices_counted(tmp_path: Path, cells: Cells) -> None:
    text = tmp_path / "figures" / "numerics.md"
    options = argparse.Namespace(device="cpu", tokens=NUM_TOKENS, methods=METHODS)
    Store(text).put("cuda", {"torch": "another"}, cells)
    Store(text).put("cpu", conditions_of(options, str(tmp_path), 2), cells)
    written = text.read_text()
    assert "## cuda" in written and "## cpu" in written and "another" in written
    assert Store(text).get("cuda") == ({"torch": "another"}, cells)
    assert main(["--page", "--table", str(text)]) == 0
    assert text.read_text() == written
