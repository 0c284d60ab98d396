"""engine.json and the check of engine folders that a server makes at load; the files are stand-ins."""

import json

import pytest

from build.trtllm.record import write_manifest
from orchestrator.core.deployment.engine_manifest import Manifest, check_engine, read_manifest
from tests.unit.build.test_trtllm_rules import refusal

TARGET = Manifest(
    role="target",
    method="draft_model",
    mode="draft_tokens_external",
    gpu="h100",
    trtllm_version="1.2.1",
    image="container",
    num_ranks=2,
    max_batch_size=8,
    max_input_len=4096,
    max_seq_len=4096,
    max_draft_len=5,
    vocab_size=128256,
    inputs={"/checkpoint": "0"},
    plan={},
)
DRAFT = TARGET.model_copy(update={"role": "draft", "mode": "", "num_ranks": 1, "max_draft_len": 0})


def make_engine(folder, manifest):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"version": manifest.trtllm_version}))
    for rank in range(manifest.num_ranks):
        (folder / f"rank{rank}.engine").touch()
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def engines(tmp_path):
    """Return the folders of a target's and a draft model's engine."""
    return make_engine(tmp_path / "target", TARGET), make_engine(tmp_path / "draft", DRAFT)


def test_engines_that_fit_pass(engines):
    target, draft = engines
    assert check_engine(target, version="1.2.1", draft=draft) == TARGET


def test_engine_of_another_version_is_refused(engines):
    target, _ = engines
    assert f"the engine {target} is of TensorRT-LLM 1.2.1, this server is 1.0.0" in refusal(
        check_engine, target, version="1.0.0"
    )
    (target / "config.json").write_text('{"version": "1.1.0"}')
    assert "was made by TensorRT-LLM 1.1.0, its engine.json says 1.2.1" in refusal(
        check_engine, target, version="1.1.0"
    )


def test_engine_without_a_rank_file_is_refused(engines):
    target, _ = engines
    (target / "rank1.engine").unlink()
    assert refusal(check_engine, target, version="1.2.1") == f"the engine {target} lacks rank1.engine (build it again)"


def test_draft_engine_with_another_vocabulary_or_a_mode_is_refused(engines):
    target, draft = engines
    manifest = read_manifest(draft)
    write_manifest(draft, manifest.model_copy(update={"vocab_size": 32000}))
    words = refusal(check_engine, target, version="1.2.1", draft=draft)
    assert words == f"the draft engine {draft} has 32000 tokens in its vocabulary, the target {target} has 128256"
    write_manifest(draft, manifest.model_copy(update={"mode": "eagle"}))
    assert "is built for eagle" in refusal(check_engine, target, version="1.2.1", draft=draft)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_engine_with_a_broken_manifest_is_refused(engines, text):
    (engines[0] / "engine.json").write_text(text)
    assert str(engines[0] / "engine.json") in refusal(check_engine, engines[0], version="1.2.1")


def test_folder_without_a_manifest_is_refused(tmp_path):
    assert "python -m build.trtllm build makes it" in refusal(check_engine, tmp_path, version="1.2.1")


def test_manifest_comes_back_as_it_was_written(engines, tmp_path):
    manifest = read_manifest(engines[0])
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert not list(tmp_path.glob("*.partial"))
