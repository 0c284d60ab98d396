"""What cannot be loaded is refused, with the reason; the draft model's engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stock_model import StockModel
from build.trtllm.record import write_manifest
from orchestrator.core.context import Context
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.engine_manifest import CHECKPOINT, read_manifest, served_checkpoint
from orchestrator.core.errors import ConfigError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from runtime.trtllm.executor import library
from runtime.trtllm.executor.build_executor import build_draft, build_target
from tests.standin.engine_folder import IMAGE, make_engine, tree_of
from tests.support.engines import ask
from tests.support.executor import GREEDY, PROMPT, config_of, request, sampled, serving, standin
from tests.support.tiny_models import VOCAB_SIZE


def test_missing_library_names_the_container(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ConfigError, match="needs the package tensorrt_llm: run the server in the container") as caught:
        build_target(config_of(folder))
    assert IMAGE in str(caught.value)


def test_library_without_engines_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_llm

    monkeypatch.setattr(tensorrt_llm, "__version__", "1.3.0")
    with pytest.raises(ConfigError, match=r"TensorRT-LLM 1\.3\.0 cannot serve compiled engines"):
        build_target(config_of(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trtllm_version": "1.1.0"}, "was made by TensorRT-LLM 1.2.1, its engine.json says 1.1.0"),
        ({"role": "draft"}, "was built as draft, not as target"),
        ({"num_ranks": 2}, "lacks rank1.engine"),
    ],
)
def test_wrong_manifest_is_refused(checkpoint: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint)
    write_manifest(folder, read_manifest(folder).model_copy(update=change))
    with pytest.raises(ConfigError, match=words):
        build_target(config_of(folder))


def test_engine_for_several_gpus_has_a_process_spawned_for_each(
    checkpoint: Path, greedy: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint, num_ranks=2)
    (folder / "rank1.engine").touch()
    worker = tmp_path / "trtllmExecutorWorker"
    monkeypatch.setattr(library, "WORKER", worker)
    with pytest.raises(ConfigError, match="an engine for 2 GPUs needs the program that runs its ranks; not found: "):
        build_target(config_of(folder))
    worker.touch()
    with serving(folder) as client:
        parallel = standin(client)._config.parallel_config
        assert parallel.device_ids == [0, 1] and parallel.communication_mode.name == "ORCHESTRATOR"
        assert parallel.orchestrator_config.worker_executable_path == str(worker)
        assert ask(client, request(PROMPT)).next_token == greedy[0]


def test_tree_is_told_to_the_library_and_must_be_the_engine_s(checkpoint: Path, tmp_path: Path) -> None:
    for mode in ("medusa", "eagle"):
        folder = make_engine(tmp_path / mode, checkpoint, mode=mode)
        with serving(folder) as client:
            told = standin(client)._config.decoding_config
        assert (told.eagle_config.eagle_choices if mode == "eagle" else told.medusa_choices) == tree_of(16)
        for spec, words in (
            ({}, "choices is missing: TensorRT-LLM's own tree has 63 nodes, and draft_len is 16"),
            ({"choices": json.dumps(tree_of(5))}, "choices must have draft_len 16 nodes, got 5"),
        ):
            write_manifest(folder, read_manifest(folder).model_copy(update={"plan": {"spec": spec}}))
            with pytest.raises(ConfigError, match=words):
                build_target(config_of(folder))
    with serving(make_engine(tmp_path / "own", checkpoint, mode="medusa", max_draft_len=63)) as client:
        assert standin(client)._config.decoding_config.medusa_choices is None


def test_library_asserts_a_tree_of_the_engine_s_size(checkpoint: Path, tmp_path: Path) -> None:
    from tensorrt_llm.bindings import executor as api

    folder = str(make_engine(tmp_path / "engine", checkpoint, mode="medusa"))
    for choices in (tree_of(5), [*tree_of(15), [0, 0, 0, 0, 0]]):
        decoding = api.DecodingConfig(api.DecodingMode.Medusa(), medusa_choices=choices)
        config = api.ExecutorConfig(1, decoding_config=decoding)
        with pytest.raises(RuntimeError, match="Assertion failed"):
            api.Executor(folder, api.ModelType.DECODER_ONLY, config)


def test_more_requests_than_the_engine_s_batch_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(folder, max_running=8):
        assert not caplog.records
    with serving(folder, max_running=9):
        assert "max_running 9 is above the engine's max_batch_size 8" in caplog.text


def test_logits_are_kept_by_engines_that_do_not_draft_inside(
    folder: Path, draft_checkpoint: Path, tmp_path: Path
) -> None:
    draft = make_engine(tmp_path / "draft", draft_checkpoint, role="draft", mode="", max_draft_len=0)
    engine, _ = build_draft(config_of(folder, draft=str(draft)))
    assert standin(engine)._config.gather_generation_logits is True
    engine.close()
    with serving(folder) as client:
        assert standin(client)._config.gather_generation_logits is True
    with serving(make_engine(tmp_path / "medusa", draft_checkpoint, mode="medusa")) as client:
        assert standin(client)._config.gather_generation_logits is False


def test_engine_that_the_library_cannot_load_is_refused_in_its_words(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint, mode="lookahead_decoding", max_draft_len=3)
    with pytest.raises(ConfigError, match=r"cannot load the engine .* needs more than max_draft_len"):
        build_target(config_of(folder))


def test_draft_engine_with_another_vocabulary_is_refused(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    draft = make_engine(tmp_path / "draft", checkpoint, role="draft", mode="", max_draft_len=0, vocab_size=99)
    with pytest.raises(ConfigError, match="has 99 tokens in its vocabulary"):
        build_target(config_of(folder, draft=str(draft)))


def test_served_checkpoint_is_what_the_engine_was_made_from(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    served = served_checkpoint(config_of(folder))
    assert (served.vocab_size, served.max_positions) == (VOCAB_SIZE, 256)
    assert served.tokenizer_file == str(folder / CHECKPOINT / "tokenizer.json")
    assert served_checkpoint(ServingConfig(target=str(checkpoint))).max_positions == 512
    short = make_engine(tmp_path / "short", checkpoint, max_input_len=40)
    assert served_checkpoint(config_of(short)).max_positions == 41
    other = make_engine(tmp_path / "engine", checkpoint, vocab_size=99)
    with pytest.raises(ConfigError, match="has 99 tokens in its vocabulary"):
        served_checkpoint(config_of(other))


def test_draft_engine_proposes_its_greedy_chain(folder: Path, draft_checkpoint: Path, tmp_path: Path) -> None:
    draft = make_engine(tmp_path / "draft", draft_checkpoint, role="draft", mode="", max_draft_len=0)
    engine, manifest = build_draft(config_of(folder, draft=str(draft)))
    assert manifest.vocab_size == VOCAB_SIZE
    plain = StockModel(draft_checkpoint)
    expected = list(PROMPT)
    for _ in range(3):
        expected.append(int(plain.logits(expected).argmax()))
    for sampling in (GREEDY, sampled(1.0, seed=5)):
        drafted = ask(engine, DraftRequest(delta_of(Context(PROMPT), 0, 3, "salt"), sampling, 3, 8))
        assert drafted.tree.tokens.tolist() == expected[-3:] and drafted.tree.is_chain
    full = Context([1] * 256)
    assert ask(engine, DraftRequest(delta_of(full, 0, 4, ""), GREEDY, 3, 3)).tree.num_nodes == 0
    engine.close()
