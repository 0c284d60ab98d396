"""The heads' trainer on a tiny random target: shifts, attention while unrolled, resume, publishing, corpora, errors."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from build.errors import BuildError
from build.heads import measure as measure_module
from build.heads import publish
from build.heads import text as text_module
from build.heads.cli import main, parser, settings_of, up_to_date
from build.heads.losses import _drafting_loss, backward_by_depth, cross_entropy_to, feature_loss
from build.heads.make import frequent_tokens, make_heads
from build.heads.measure import Recorded, acceptance_length, accuracies, best_tree, chain, measure, ranks_of
from build.heads.publish import as_published
from build.heads.settings import ABLATED, KINDS, Part, Settings, Sizes, kinds_named
from build.heads.sharpness import TRIED, argmax_sharpness, sampled_sharpness
from build.heads.sharpness import main as measure_again
from build.heads.target import Batch, FrozenTarget, load_target
from build.heads.teacher_forcing import RootRows, all_rows, draft_logits, sampled_rows
from build.heads.text import heads_text, read_corpus
from build.heads.train import HeadsRun, begin_run
from build.recipe import Plan
from build.sizes import folder_sizes
from build.workspace import MODELS, Workspace
from orchestrator.core.errors import ConfigError
from orchestrator.deployment.config import ServingConfig
from runtime.engine.torch_engine import load_draft
from runtime.heads.checkpoint.load import load_head
from runtime.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.heads.modules.medusa import MedusaHeads
from runtime.heads.modules.redrafter import RedrafterHead
from runtime.heads.sharpness import LEAST
from runtime.model.features import layers_of
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_target

PLAN = Plan(tokens=10 * 64, peak_rate=1.0, step_tokens=64, short_length=16, long_length=32, long_share=0.3)
SIZES = Sizes(medusa_heads=3, draft_vocab=40)
TINY = Settings(ablation=True, sizes=SIZES, plan=PLAN, dtype="float32")
STREAM = np.random.default_rng(0).integers(0, VOCAB_SIZE, 5_000).astype(np.uint16)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=7, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def target(folder: Path) -> FrozenTarget:
    return load_target(str(folder), "cpu", reads_layers=True)


# Medusa's gradients, head by head


class Held:
    """A tensor that a graph holds for its backward pass, counted as long as it is held."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.numel()
        Held.now += self.size
        Held.most = max(Held.most, Held.now)

    def __del__(self) -> None:
        Held.now -= self.size


def test_medusa_s_heads_learn_the_same_one_by_one_and_hold_one_head_s_logits(target: FrozenTarget) -> None:
    settings = replace(TINY, kinds=("medusa",), parts={"medusa": Part(1e-3, depth=4, text=0.3)})
    settings = replace(settings, sizes=replace(SIZES, medusa_heads=4))
    batch = target.read(torch.from_numpy(STREAM[:330].astype(np.int64)).view(10, 33))
    roots = all_rows(batch.num_rows, 4, CPU)
    gradients, peaks, losses = [], [], []
    for backward in (
        lambda head: _drafting_loss(head, batch, settings.part("medusa"), roots),
        lambda head: backward_by_depth(head, batch, settings.part("medusa"), roots),
    ):
        head = make_heads(target, settings, STREAM)["medusa"]
        Held.now = Held.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            loss = backward(head)
            if loss.requires_grad:
                loss.backward()
        losses.append(float(loss.detach()))
        peaks.append(Held.most)
        gradients.append([parameter.grad for parameter in head.parameters()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole)
    assert peaks[1] < 0.35 * peaks[0], peaks


# What the target says


def test_target_is_read_as_transformers_says_it(target: FrozenTarget):
    windows = torch.from_numpy(STREAM[:66].astype(np.int64)).view(2, 33)
    read = target.read(windows)
    with torch.no_grad():
        whole = target.model(input_ids=windows[:, :-1], output_hidden_states=True)
    torch.testing.assert_close(read.last, whole.hidden_states[-1])
    inputs = torch.cat([whole.hidden_states[layer] for layer in layers_of(7)], dim=-1)
    torch.testing.assert_close(read.layers * target.layer_scale, inputs)
    torch.testing.assert_close(read.p, whole.logits.softmax(-1))


def test_states_of_layers_are_scaled_to_about_one_by_a_power_of_two(target: FrozenTarget):
    windows = torch.from_numpy(STREAM[:66].astype(np.int64)).view(2, 33)
    target.fit_scale(windows)
    assert np.log2(target.layer_scale) % 1 == 0
    assert 0.7 < float(target.read(windows).layers.square().mean().sqrt()) < 1.5
    scale = target.layer_scale
    target.fit_scale(windows)
    assert target.layer_scale == scale


def test_target_continues_with_its_most_likely_tokens(target: FrozenTarget):
    start = torch.from_numpy(STREAM[:10].astype(np.int64))[None]
    tokens = target.continued(start, 5)
    with torch.no_grad():
        target_tokens = target.model(input_ids=tokens).logits.argmax(-1)
    assert tokens.shape == (1, 15)
    assert tokens[:, 10:].tolist() == target_tokens[:, 9:14].tolist()


# Shifts: the state of row i spells token i + 1 + k, tokens are random, so that depth k alone can know its own.

VOCAB, WIDTH, ROWS, DEPTH = 12, 16, 40, 4
SMALL = LlamaConfig(
    hidden_size=WIDTH, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=VOCAB
)


def spelling_batch(seed: int, k: int, p_shift: int = 0) -> Batch:
    numbers = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (8, ROWS + DEPTH + 3), generator=numbers)
    spelt = nn.functional.one_hot(text, WIDTH).float() * 3
    last = spelt[:, 1 + k : 1 + k + ROWS]
    p = nn.functional.one_hot(text[:, 1 + p_shift : 1 + p_shift + ROWS], VOCAB).float()
    return Batch(text[:, : ROWS + 1], last, last.repeat(1, 1, 3), p)


def new_head(kind: str) -> nn.Module:
    torch.manual_seed(1)
    table = torch.randn(VOCAB, WIDTH)
    if kind == "medusa":
        return MedusaHeads(DEPTH, 1, table)
    if kind == "redrafter":
        return RedrafterHead(table, 1, 2 * WIDTH)
    return EagleHead(SMALL, table, table) if kind == "eagle" else Eagle3Head(SMALL, table, VOCAB)


def losses_by_depth(head: nn.Module, batch: Batch) -> list[Tensor]:
    roots = all_rows(ROWS, DEPTH, CPU)
    logits = draft_logits(head, batch, roots, DEPTH)
    return [cross_entropy_to(roots.take(batch.p, depth), logit) for depth, logit in enumerate(logits, start=1)]


def learned_depths(kind: str, k: int, p_shift: int = 0) -> set[int]:
    head = new_head(kind)
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-2)
    for seed in range(80):
        optimizer.zero_grad()
        sum(losses_by_depth(head, spelling_batch(seed, k, p_shift))).backward()
        optimizer.step()
    with torch.no_grad():
        losses = losses_by_depth(head, spelling_batch(999, k, p_shift))
    return {depth for depth, loss in enumerate(losses, start=1) if loss < 0.5 * np.log(VOCAB)}


@pytest.mark.parametrize("kind", ["medusa", "redrafter"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_depth_learns_its_own_shift_and_no_other(kind: str, k: int):
    assert learned_depths(kind, k) == {k}


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_depth_of_an_eagle_head_learns_its_own_shift_and_none_beyond(kind: str, k: int):
    """Depths before k may find theirs in the entries before."""
    assert max(learned_depths(kind, k), default=0) == k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p_shift", [-1, 1])
def test_planted_off_by_one_is_caught(kind: str, p_shift: int):
    assert max(learned_depths(kind, 2, p_shift), default=0) != 2


def test_feature_loss_asks_for_the_next_feature_and_the_token_after_the_root():
    batch, head = spelling_batch(0, 1), new_head("eagle")
    roots = all_rows(ROWS, 1, CPU)
    guessed = batch.last[:, 1:]  # a head that is always right
    head.forward = lambda *given: guessed  # type: ignore[method-assign]
    settings = replace(TINY, token_weight=0.0)
    assert feature_loss(head, batch, settings, torch.rand(batch.last.shape)) == 0
    settings = replace(TINY, feature_weight=0.0, token_weight=1.0)
    expected = cross_entropy_to(roots.take(batch.p, 1), head.logits(guessed))
    assert feature_loss(head, batch, settings, torch.rand(batch.last.shape)) == expected


# The attention of a teacher-forced head is that of a served one.


def served(head: EagleHead | Eagle3Head, batch: Batch, row: int, place: int, depth: int) -> list[Tensor]:
    """Logits of each depth, from `place` of one window: entries one by one, each beside the keys cached before it."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(key[0, :, 0])
        values.append(value[0, :, 0])
        output = torch.zeros_like(query[:, :, 0])  # (1, H, e)
        group = query.shape[1] // key.shape[1]
        for number in range(query.shape[1]):
            own = [seen[number // group] for seen in keys]
            weights = torch.stack([query[0, number, 0] @ seen / query.shape[-1] ** 0.5 for seen in own]).softmax(-1)
            output[0, number] = sum(w * seen[number // group] for w, seen in zip(weights, values, strict=True))
        return output[:, None]

    features = batch.layers if isinstance(head, Eagle3Head) else batch.last
    states = list(head.fuse(features[row, : place + 1]))
    logits = []
    for position in range(place + depth):
        token = batch.tokens[row, position + 1].view(1, 1)
        state = head(states[position][None, None], token, torch.tensor([[position]]), attend)[0, 0]
        if position >= place:
            states.append(state)
            logits.append(head.logits(state))
    return logits


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_teacher_forced_head_has_the_logits_that_it_has_when_served_step_by_step(kind: str, share: float):
    head, batch = new_head(kind).double(), spelling_batch(5, 1)
    batch = batch._replace(last=torch.randn_like(batch.last).double(), layers=torch.randn_like(batch.layers).double())
    roots = sampled_rows(ROWS, DEPTH, share, torch.Generator().manual_seed(0), CPU)
    with torch.no_grad():
        drafted = torch.stack(list(draft_logits(head, batch, roots, DEPTH)))  # (depth, B, m, V)
        for row, number in product((0, 3), (0, len(roots.rows) // 2, len(roots.rows) - 1)):
            expected = torch.stack(served(head, batch, row, int(roots.rows[number]), DEPTH))
            torch.testing.assert_close(drafted[:, row, number], expected)


def test_root_rows_are_sampled_within_the_window_and_taken_with_an_offset():
    roots = sampled_rows(20, 4, 0.5, torch.Generator().manual_seed(3), CPU)
    x = torch.arange(20)[None]
    assert len(roots.rows) == 8
    assert roots.rows.tolist() == sorted(set(roots.rows.tolist()))
    assert int(roots.rows.max()) < 16
    assert torch.equal(roots.take(x, 4)[0], roots.rows + 4)
    assert torch.equal(all_rows(20, 4, CPU).take(x, 4)[0], torch.arange(4, 20))


# The run


def tiny_run(target: FrozenTarget, settings: Settings = TINY, corpus: str = "corpus") -> HeadsRun:
    return begin_run(settings, target, STREAM, corpus)


def test_resumed_run_ends_with_the_parameters_of_an_uninterrupted_one(target: FrozenTarget, tmp_path: Path):
    whole, first = tiny_run(target), tiny_run(target)
    for _ in range(10):
        whole.train_step()
    for _ in range(8):
        first.train_step()
    first.save(tmp_path / "checkpoint.pt")
    second = tiny_run(target)
    second.resume(tmp_path / "checkpoint.pt")
    assert [second.train_step() for _ in range(2)]
    assert second.progress.losses == whole.progress.losses
    for (name, one), other in zip(whole.heads.named_parameters(), second.heads.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_run_after_its_step_and_saves_it(target: FrozenTarget, tmp_path: Path, number: signal.Signals):
    run, path = tiny_run(target), tmp_path / "checkpoint.pt"

    class Interrupted(HeadsRun):
        def backward(self, windows: Tensor) -> dict[str, float]:
            if self.progress.step == 2:
                signal.raise_signal(number)
            return super().backward(windows)

    handler = signal.getsignal(number)
    run.__class__ = Interrupted
    assert not run.train(path)
    run.__class__ = HeadsRun
    assert signal.getsignal(number) is handler
    assert torch.load(path, weights_only=True)["progress"]["step"] == 3
    run.resume(path)
    assert run.train(path)
    assert run.progress.step == 10


def test_step_reads_the_target_once_for_all_heads_and_leaves_it_as_it_was(target: FrozenTarget):
    run, passes = tiny_run(target), []
    before = [parameter.clone() for parameter in target.model.parameters()]
    hook = target.model.register_forward_hook(lambda *given: passes.append(1))
    losses = run.train_step()
    hook.remove()
    assert passes == [1]
    assert list(losses) == [*KINDS, ABLATED]
    assert all(torch.equal(one, other) for one, other in zip(before, target.model.parameters(), strict=True))


def test_head_is_trained_alike_whatever_is_trained_beside_it(target: FrozenTarget):
    together, alone = tiny_run(target), tiny_run(target, replace(TINY, kinds=("medusa",), ablation=False))
    for _ in range(3):
        together.train_step()
        alone.train_step()
    for one, other in zip(together.heads["medusa"].parameters(), alone.heads["medusa"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_cut_run_ends_with_long_windows(target: FrozenTarget):
    run = tiny_run(target)
    for _ in range(3):
        run.train_step()
    run.progress.finish_now()
    assert run.progress.plan.steps == 5
    assert run.progress.plan.phase(3).length == 32


@pytest.mark.parametrize("change", [{"corpus": "other"}, {"settings": replace(TINY, seed=1)}])
def test_checkpoint_of_another_run_is_refused(target: FrozenTarget, tmp_path: Path, change: dict):
    tiny_run(target).save(tmp_path / "checkpoint.pt")
    with pytest.raises(BuildError, match="another corpus, teacher, target or settings"):
        tiny_run(target, **change).resume(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tokens": 1280},
            r"follows a plan of tokens 640, but 1280 was requested \(--tokens\); request 640 to continue",
        ),
        ({"step_tokens": 32}, r"step_tokens 64, but 32 was requested \(--step-tokens\)"),
        ({"floor": 0.5}, r"floor 0\.05, but 0\.5 was requested \(build/heads/settings\.py\)"),
    ],
)
def test_checkpoint_of_another_plan_is_refused_with_both_numbers(
    target: FrozenTarget, tmp_path: Path, change: dict, words: str
):
    tiny_run(target).save(tmp_path / "checkpoint.pt")
    with pytest.raises(BuildError, match=words):
        tiny_run(target, replace(TINY, plan=replace(PLAN, **change))).resume(tmp_path / "checkpoint.pt")


def test_checkpoint_of_a_cut_run_is_gone_on_with_the_uncut_plan_s_options(target: FrozenTarget, tmp_path: Path):
    run = tiny_run(target)
    run.progress.step = 3
    run.progress.finish_now()
    run.save(tmp_path / "checkpoint.pt")
    other = tiny_run(target)
    other.resume(tmp_path / "checkpoint.pt")
    assert other.progress.plan.cut_step == 3


def test_losses_fall_on_a_text_that_repeats_itself(target: FrozenTarget):
    settings = replace(TINY, plan=replace(PLAN, tokens=60 * 64), parts={k: Part(5e-3, depth=3) for k in TINY.parts})
    run = begin_run(settings, target, np.tile(np.arange(8, dtype=np.uint16), 600), "corpus")
    losses = [run.train_step() for _ in range(30)]
    assert all(losses[-1][name] < losses[0][name] for name in run.heads)


def test_draft_vocabulary_is_of_the_most_frequent_tokens():
    stream = np.array([5, 5, 5, 2, 2, 9, 9, 1], dtype=np.uint16)
    assert frequent_tokens(stream, 3, 16).tolist() == [2, 5, 9]
    with pytest.raises(BuildError, match=r"must be in 1..16, got 17"):
        frequent_tokens(stream, 17, 16)


# Measuring

RANKS = np.array([[[0, 0, 1], [0, 3, 0], [2, 0, 0], [0, 0, 0], [1, 1, 9], [0, 9, 9]]])


def test_acceptance_length_walks_from_step_to_step():
    # Lengths along the rows: 2, 1, 0, 3, 0, 1; the walk meets row 0 (3 tokens) and row 3 (4 tokens), and is at the end.
    assert acceptance_length(RANKS, chain(3)) == 3.0
    assert acceptance_length(RANKS, {(1,), (1, 1)}) == 6 / 5


def test_accuracies_count_the_right_token_among_the_best():
    found = accuracies(RANKS)
    assert [row["top1"] for row in found] == [0.6667, 0.5, 0.5]
    assert [row["top2"] for row in found] == [0.8333, 0.6667, 0.6667]


def test_best_tree_is_the_best_of_all_trees():
    hits = np.array([[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]])
    nodes = [path for depth in (1, 2) for path in product(range(3), repeat=depth)]
    worth = {path: float(np.prod([hits[j, r] for j, r in enumerate(path)])) for path in nodes}
    for size in range(1, 9):
        tree = best_tree(hits, size)
        assert all(path[:-1] in tree for path in tree if len(path) > 1)
        best = sorted(worth.values(), reverse=True)[:size]
        assert sum(worth[path] for path in tree) == pytest.approx(sum(best))


def test_ranks_of_a_draft_vocabulary_put_what_it_lacks_behind_all(target: FrozenTarget):
    heads = make_heads(target, TINY, STREAM)
    batch = target.read(torch.from_numpy(STREAM[:66].astype(np.int64)).view(2, 33))
    ranks = ranks_of(heads["eagle3"], batch, depth=2)
    head = heads["eagle3"]
    assert isinstance(head, Eagle3Head)
    known = set(head.ids.tolist())
    with torch.no_grad():
        logits = list(islice(draft_logits(head, batch, all_rows(32, 2, CPU), 2), 2))
    for row, place, depth in product(range(2), range(30), range(2)):
        token = int(batch.tokens[row, place + depth + 2])
        rank = int(ranks[row, place, depth])
        assert (rank == VOCAB_SIZE) == (token not in known)
        if token in known:
            best = head.ids[logits[depth][row, place].argsort(descending=True)].tolist()
            assert best.index(token) == rank


def test_perfect_head_accepts_its_whole_chain(target: FrozenTarget):
    """Medusa's new heads say what the LM head says of row i: on a constant text that is always right or always wrong."""
    heads = make_heads(target, TINY, STREAM)
    batch = target.read(torch.full((2, 65), 5))
    heads["medusa"][0][-1].weight.data.zero_()
    heads["medusa"][0][-1].weight.data[5] = batch.last.mean((0, 1))
    found = measure(heads["medusa"], Recorded([batch]))
    assert found["accuracy"][0]["top1"] == 1.0
    assert found["places"] == 2 * (64 - 6)


def test_a_head_is_as_sure_of_its_guesses_as_it_is_right(target: FrozenTarget):
    """Of a flat head, whose best guess is always right, and of one that is always wrong and should be less sure."""
    head = make_heads(target, replace(TINY, sizes=replace(SIZES, medusa_heads=1)), STREAM)["medusa"]
    batch = target.read(torch.full((2, 65), 5))
    head[0][0].linear.bias.data.fill_(100.0)  # which drowns the state, so that token 5 has about the logit 1
    head[0][-1].weight.data.zero_()
    head[0][-1].weight.data[5] = 0.01 / batch.last.shape[-1]
    assert argmax_sharpness(head, Recorded([batch])) == min(TRIED)
    wrong = batch._replace(tokens=torch.full_like(batch.tokens, 9))
    assert argmax_sharpness(head, Recorded([wrong])) == 1.0


def test_a_sampled_token_is_as_surely_accepted_as_q_resembles_p(target: FrozenTarget):
    head = make_heads(target, replace(TINY, sizes=replace(SIZES, medusa_heads=1)), STREAM)["medusa"]
    batch = target.read(torch.from_numpy(STREAM[:660].astype(np.int64)).view(10, 66))
    with torch.no_grad():
        q = (0.3 * head[0](batch.last)).softmax(-1)
    head[0][-1].weight.data.mul_(0.3)
    same, other = (batch.p.clone() for _ in range(2))
    same[:, 1:] = q[:, :-1]
    # A p that is a token drawn from q: a second one drawn from q is accepted if it is the same.
    drawn = torch.multinomial(q.flatten(0, 1), 1, generator=torch.Generator().manual_seed(0)).view(*q.shape[:2], 1)
    other[:, 1:] = torch.zeros_like(q).scatter_(-1, drawn, 1.0)[:, :-1]
    assert sampled_sharpness(head, [batch._replace(p=same)]) == LEAST
    assert sampled_sharpness(head, [batch._replace(p=other)]) == pytest.approx(1.0, abs=0.02)
    assert sampled_sharpness(head, [batch._replace(p=0.5 * (same + other))]) == pytest.approx(0.5, abs=0.02)


# The command, its files, its errors


@pytest.fixture(scope="module", autouse=True)
def short_measurements() -> Iterator[None]:
    """Heads that were hardly trained need no precise numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "MEASURED_WINDOWS", 4)
        patch.setattr(measure_module, "WINDOW", 48)
        patch.setattr(measure_module, "PROMPT_TOKENS", 8)
        patch.setattr(measure_module, "GREEDY_TOKENS", 24)
        patch.setattr(text_module, "DOCUMENT_CHARS", 1_000)
        yield


def write_corpus(folder: Path) -> Path:
    numbers = np.random.default_rng(3)
    letters = np.array(list("abcdefghij\n"))
    file = folder / "corpus.txt"
    file.write_text("".join(letters[numbers.integers(0, 11, 60_000)]))
    return file


def command(folder: Path, corpus: Path, out: Path, *more: str) -> list[str]:
    sizes = [
        "--tokens=256",
        "--step-tokens=64",
        "--own-tokens=0",
        "--medusa-heads=2",
        "--draft-vocab=20",
        "--dtype=float32",
    ]
    return [f"--target={folder}", f"--corpus={corpus}", f"--out={out}", "--device=cpu", *sizes, *more]


@pytest.fixture(scope="module")
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    main(command(folder, write_corpus(tmp_path_factory.mktemp("corpus")), out, "--ablation"))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_published_head_loads_and_says_what_the_trained_one_says(
    published: Path, folder: Path, target: FrozenTarget, kind: str
):
    loaded = load_head(kind, str(published / kind), str(folder), torch.float32, CPU)
    state = torch.load(published / ".train" / "heads" / "checkpoint.pt", weights_only=True)["model"]
    windows = torch.from_numpy(STREAM[:66].astype(np.int64)).view(2, 33)
    target.fit_scale(windows)
    batch = target.read(windows)
    options = parser().parse_args(command(folder, Path(), published))
    head = make_heads(target, settings_of(options, target), STREAM)[kind]
    head.load_state_dict({key.removeprefix(f"{kind}."): v for key, v in state.items() if key.startswith(f"{kind}.")})
    roots, stored = all_rows(32, 2, CPU), batch._replace(layers=batch.layers * target.layer_scale)
    with torch.no_grad():
        one = draft_logits(as_published(head), batch, roots, 2)
        other = draft_logits(loaded, stored, roots, 2)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert "lm_head.weight" not in state or kind == "eagle3"


def test_the_sharpness_of_a_head_is_recorded_with_its_files(published: Path, folder: Path, tmp_path: Path):
    for kind in KINDS:
        config = json.loads((published / kind / "config.json").read_text())
        assert config["sharpness"] == json.loads((published / kind / "provenance.json").read_text())["sharpness"]
        assert (
            load_head(kind, str(published / kind), str(folder), torch.float32, CPU).sharpness._asdict()
            == (config["sharpness"])
        )
    shutil.copytree(published / "eagle3", tmp_path / "eagle3")
    measured, others = config_without_sharpness(tmp_path / "eagle3")
    arguments = [str(tmp_path / "eagle3"), "--kind=eagle3", f"--target={folder}", f"--out={tmp_path}", "--windows=4"]
    arguments.append(f"--corpus={write_corpus(tmp_path)}")
    measure_again([*arguments, "--dry-run"])
    assert json.loads((tmp_path / "eagle3" / "config.json").read_text()) == others
    measure_again(arguments)
    found = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert found == others | {"sharpness": pytest.approx(measured, abs=0.1)}
    with pytest.raises(BuildError, match=r"has no config\.json"):
        measure_again([str(tmp_path), "--kind=eagle3"])


def test_the_sharpness_of_a_draft_model_is_measured_and_read_again(folder: Path, tmp_path: Path) -> None:
    """The target itself is right whenever it guesses, so it may be as sure as any value makes it."""
    draft = shutil.copytree(folder, tmp_path / "draft")
    arguments = [str(draft), "--kind=draft", f"--target={folder}", f"--out={tmp_path}", "--windows=4"]
    measure_again([*arguments, f"--corpus={write_corpus(tmp_path)}"])
    assert json.loads((draft / "config.json").read_text())["sharpness"] == {"argmax": min(TRIED), "sampled": 1.0}
    served = ServingConfig(target=str(folder), draft=str(draft), kv_memory_mb=1, dtype="float32")
    assert load_draft(served)._sharpness == min(TRIED)
    config = json.loads((draft / "config.json").read_text()) | {"sharpness": {"argmax": 7}}
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"sharpness.argmax must be a number in 0\.01\.\.1, got 7"):
        load_draft(served)


def config_without_sharpness(folder: Path) -> tuple[dict, dict]:
    """Take the sharpness out of a head's config.json; return it, and the rest."""
    config = json.loads((folder / "config.json").read_text())
    measured = config.pop("sharpness")
    (folder / "config.json").write_text(json.dumps(config))
    return measured, config


def test_published_folders_say_how_they_were_made(published: Path, target: FrozenTarget):
    for kind in KINDS:
        provenance = json.loads((published / kind / "provenance.json").read_text())
        config = json.loads((published / kind / "config.json").read_text())
        assert provenance["complete"]
        assert provenance["tokens"] == 256
        assert set(provenance["losses"]) == {kind}
        assert config["target_fingerprint"] == provenance["target_fingerprint"] == target.identity
        assert "simulated" in (published / kind / "README.md").read_text().lower()
        assert str(published) not in (published / kind / "README.md").read_text() + json.dumps(provenance)
    assert not (published / ABLATED).exists()
    numbers = json.loads((published / ".train" / "heads" / "heads-ablation.json").read_text())
    assert [found["tokens"] for found in numbers.values()] == [256, 256]


def test_ablated_head_does_not_see_the_token(published: Path, folder: Path):
    loaded = load_head("eagle", str(published / ".train" / "heads" / ABLATED), str(folder), torch.float32, CPU)
    assert isinstance(loaded, EagleHead)
    assert not loaded.reads_token


def test_published_heads_are_up_to_date_until_the_settings_change(published: Path, folder: Path):
    assert up_to_date(command(folder, Path(), published))
    assert not up_to_date(command(folder, Path(), published, "--tokens=320"))
    assert not up_to_date(command(folder, Path(), published / "elsewhere"))


def test_head_of_another_target_is_refused_and_not_replaced(published: Path, folder: Path, tmp_path: Path):
    other = make_tiny_target(tmp_path / "other", seed=1, num_hidden_layers=7, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="was trained for another target"):
        load_head("medusa", str(published / "medusa"), str(other), torch.float32, CPU)
    with pytest.raises(BuildError, match="medusa holds a head of another target"):
        main(command(other, write_corpus(tmp_path), published, "--dry-run"))


def test_finished_run_is_not_published_again_for_more_tokens(published: Path, folder: Path, tmp_path: Path):
    corpus, out = write_corpus(tmp_path), tmp_path / "out"
    shutil.copytree(published / ".train", out / ".train")
    for more in ([], ["--publish-only"], ["--dry-run"]):
        with pytest.raises(BuildError, match=r"a plan of tokens 256, but 1280 was requested \(--tokens\)"):
            main(command(folder, corpus, out, "--ablation", "--tokens=1280", *more))
    assert not (out / "medusa").exists()


def test_interim_heads_are_published_and_marked(published: Path, folder: Path, tmp_path: Path, capsys):
    corpus, out = write_corpus(tmp_path), tmp_path / "out"
    with pytest.raises(BuildError, match="no checkpoint"):
        main(command(folder, corpus, out, "--publish-only"))
    main(command(folder, corpus, out, "--dry-run"))
    assert "minutes of training on cpu by a burst of" in capsys.readouterr().out
    assert not (out / "medusa").exists()
    shutil.copytree(published / ".train", out / ".train", dirs_exist_ok=True)
    checkpoint = out / ".train" / "heads" / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True)
    state["progress"]["step"] = 2
    torch.save(state, checkpoint)
    main(command(folder, corpus, out, "--publish-only", "--ablation"))
    assert not json.loads((out / "eagle" / "provenance.json").read_text())["complete"]
    assert "interim" in (out / "eagle" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--heads=medusa,hydra"], "unknown head 'hydra'; the heads are medusa, eagle, eagle3, redrafter"),
        (["--heads="], "unknown head"),
        (["--corpus=nowhere.txt"], "the corpus nowhere.txt does not exist"),
        (["--medusa-heads=0"], "must be positive"),
        (["--draft-vocab=65"], r"must be in 1\.\.64, got 65"),
        (["--tokens=3"], "less than a step"),
        (["--target=./nowhere"], "the target ./nowhere cannot be used"),
    ],
)
def test_bad_arguments_are_told_in_a_sentence(folder: Path, tmp_path: Path, arguments: list[str], reason: str):
    with pytest.raises(BuildError, match=reason):
        main(command(folder, write_corpus(tmp_path), tmp_path, *arguments, "--dry-run"))


def test_target_of_too_few_layers_trains_all_heads_but_eagle3(tmp_path: Path):
    shallow = make_tiny_target(tmp_path / "shallow")
    with pytest.raises(BuildError, match="has 3 layers, at least 7 are needed"):
        load_target(str(shallow), "cpu", reads_layers=True)
    run = begin_run(
        replace(TINY, kinds=("medusa", "eagle", "redrafter")), load_target(str(shallow), "cpu", False), STREAM, ""
    )
    assert set(run.train_step()) == {"medusa", "eagle", "redrafter", ABLATED}


def test_kinds_are_put_in_order():
    assert kinds_named(" redrafter, medusa") == ("medusa", "redrafter")


def test_jsonl_lines_are_documents_of_what_their_keys_hold(tmp_path: Path):
    lines = [
        {"text": "plain"},
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]},
        {"conversations": [{"from": "human", "value": "ask"}]},
        {"prompt": "one", "completion": "two"},
    ]
    file = tmp_path / "some.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    assert [d.text for d in read_corpus(file).documents] == ["plain", "ask\nanswer", "ask", "one\ntwo"]
    assert read_corpus(tmp_path).sha256 != read_corpus(file).sha256


@pytest.mark.parametrize(
    ("line", "reason"), [("{", "line 2 cannot be read as JSON"), ('{"id": 3}', "line 2 has no text under")]
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str, reason: str):
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(BuildError, match=reason):
        read_corpus(file)


def test_text_is_cut_at_line_ends_and_partly_held_out(folder: Path, tmp_path: Path):
    file = write_corpus(tmp_path)
    corpus = read_corpus(file)
    assert "".join(document.text for document in corpus.documents) == file.read_text()
    assert all(document.text.endswith("\n") for document in corpus.documents[:-1])
    text = heads_text(str(folder), str(file), Workspace(tmp_path), tmp_path / "scratch")
    again = heads_text(str(folder), str(file), Workspace(tmp_path), tmp_path / "scratch")
    assert 0 < len(text.held_out) < len(text.train)
    assert np.array_equal(text.train, again.train)
    file.write_text("too little\n")
    with pytest.raises(BuildError, match="too few to hold some out"):
        heads_text(str(folder), str(file), Workspace(tmp_path), tmp_path / "scratch")


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_head_loads_for_the_demo_target_within_its_ceiling(kind: str):
    load_head(kind, str(MODELS / kind), str(MODELS / "target"), torch.float32, CPU)
    assert next(row for row in folder_sizes(MODELS) if row.name == kind).fits


def test_shipped_heads_are_finished_and_of_the_present_settings():
    assert up_to_date([])


def test_one_root_row_is_enough():
    assert RootRows(torch.tensor([3]), contiguous=False).take(torch.arange(10)[None], 2).tolist() == [[5]]
