"""serving.toml: precedence, paths, and what is refused in which words."""

import tomllib
from pathlib import Path

import pytest

from orchestrator.core.deployment.config import CHECKPOINTS, FOLDERS, ServingConfig, load_config
from orchestrator.core.errors import ConfigError
from orchestrator.core.methods import DRAFTERS

ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture
def write(tmp_path):
    def _write(text):
        (tmp_path / "serving.toml").write_text(text)
        return tmp_path / "serving.toml"

    return _write


def refusal(path, environ=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_config_target_alone_takes_every_default(write, tmp_path):
    config = load_config(write('target = "m"'), {})
    assert config == ServingConfig(target=str(tmp_path / "m"))


def test_config_environment_wins_over_file_wins_over_default(write):
    path = write('target = "m"\nmax_nodes = 7\nblock_tokens = 8')
    config = load_config(
        path, {"SERVING_MAX_NODES": "9", "SERVING_PREFIX_SHARING": "false", "SERVING_DEVICE": "cuda:1"}
    )
    assert (config.max_nodes, config.block_tokens, config.max_running) == (9, 8, 32)
    assert config.prefix_sharing is False
    assert config.device == "cuda:1"


def test_config_paths_start_at_the_file_not_at_the_working_directory(write, tmp_path, monkeypatch):
    path = write('target = "models/../t"\ndraft = "/abs/d"\nngram_tables = "tables"')
    monkeypatch.chdir("/")
    config = load_config(path, {})
    assert (config.target, config.draft, config.ngram_tables) == (f"{tmp_path}/t", "/abs/d", f"{tmp_path}/tables")


def test_config_owner_slash_name_is_a_hub_id_unless_the_folder_exists(write, tmp_path):
    path = write('target = "owner/name"')
    assert load_config(path, {}).target == "owner/name"
    (tmp_path / "owner").mkdir()
    assert load_config(path, {}).target == str(tmp_path / "owner/name")


def test_config_unknown_user_is_refused_where_the_value_is_set(tmp_path):
    (tmp_path / "my.toml").write_text('target = "m"\nngram_tables = "~nobody-of-this-name/t"')
    said = refusal(tmp_path / "my.toml")
    assert "'~nobody-of-this-name/t' names no folder" in said and f"(key ngram_tables in {tmp_path}/my.toml)" in said
    said = refusal(tmp_path / "my.toml", {"SERVING_NGRAM_TABLES": "~nobody-at-all/t"})
    assert "'~nobody-at-all/t' names no folder" in said and "(environment variable SERVING_NGRAM_TABLES)" in said


def test_config_unknown_key_names_the_nearest(write):
    said = refusal(write('target = "m"\nmax_node = 3'))
    assert "'max_node'" in said and "'max_nodes'" in said and "serving.toml" in said


def test_config_unknown_variable_names_the_nearest_and_itself(write):
    said = refusal(write('target = "m"'), {"SERVING_DRAFTT": "x"})
    assert "'draft'" in said and "SERVING_DRAFTT" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max_nodes = 0", ("max_nodes", "1..128", "got 0")),
        ("max_nodes = 129", ("1..128", "129")),
        ("max_nodes = 1.5", ("integer", "1.5")),
        ('max_nodes = "many"', ("integer", "'many'")),
        ("max_nodes = true", ("integer", "True")),
        ("max_running = -1", ("max_running", "1..256", "-1")),
        ("prefix_sharing = 1", ("true or false", "1")),
        ("draft = 3", ("draft", "a string", "3")),
        ('dtype = "float23"', ("'float23'", "'float32'", "bfloat16")),
        ('engine = "vllm"', ("engine", "tensorrt_llm", "torch")),
        ('device = "gpu"', ("device", "cpu, cuda or cuda:N", "'gpu'")),
        ('default_speculation = "magic"', ("prompt_lookup", "'magic'")),
        (
            'default_speculation = "mtp"',
            ("unknown method 'mtp'", "allowed: auto, draft_model, eagle,", "default_speculation"),
        ),
        ('default_speculation = "suffix+mtp"', ("unknown method 'mtp'", "key default_speculation in")),
        ('default_speculation = "none+suffix"', ("'none' cannot be part of a union: it proposes nothing",)),
        ('default_speculation = "suffix+lookahead"', ("'lookahead' cannot be part of a union: it learns from",)),
        ('default_speculation = "suffix+suffix"', ("a union joins 2..4 different methods, got 'suffix+suffix'",)),
        ('default_speculation = ""', ("unknown method ''", "prompt_lookup")),
        ('default_speculation = "draft_model"', ("'draft_model'", "needs the key draft")),
        ('default_speculation = "ngram"', ("'ngram'", "needs the key ngram_tables, corpus_index or remember_tokens")),
        (
            'default_speculation = "suffix+ngram"',
            ("'ngram'", "needs the key ngram_tables, corpus_index or remember_tokens"),
        ),
        ("remember_tokens = 4000001", ("remember_tokens", "0..4000000", "4000001")),
        ('engine = "tensorrt_llm"\nmedusa = "m"', ("medusa is for engine = 'torch'", "contain their heads")),
        ('default_speculation = "suffix+eagle2"', ("'eagle2'", "needs the key eagle")),
        ("default_max_tokens = 5000", ("1..4096", "max_tokens_limit", "5000")),
        ("max_timeout_ms = 20000", ("request_timeout_ms", "1..20000", "max_timeout_ms", "60000")),
        ("max_timeout_ms = 9999", ("max_timeout_ms", "10000..86400000", "9999")),
        ("[table]\nkey = 1", ("unknown key", "'table'")),
        ("target", ("not TOML",)),
    ],
)
def test_config_bad_value_says_what_value_allowed_and_where(write, line, words):
    said = refusal(write(f'target = "m"\n{line}' if line != "target" else "target = "))
    assert all(word in said for word in (*words, "serving.toml")), said


@pytest.mark.parametrize("line", ['ngram_tables = "t"', "remember_tokens = 1"])
def test_config_ngram_by_default_needs_only_one_source_of_statistics(write, line):
    assert load_config(write(f'target = "m"\ndefault_speculation = "ngram"\n{line}'), {})


@pytest.mark.parametrize("text", ["", 'target = ""'])
def test_config_without_target_is_refused(write, text):
    assert "target is missing" in refusal(write(text))


def test_config_missing_file_and_bad_bytes_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "not TOML" in refusal(tmp_path / "bytes.toml")


def test_config_shipped_file_is_the_default_but_for_its_models():
    """What it repeats of the defaults can contradict them, so that is only what most users change."""
    config = load_config(ROOT / "tests/data/serving.toml", {})
    keys = tomllib.loads((ROOT / "tests/data/serving.toml").read_text())
    assert {key for key in keys if key not in FOLDERS} == {"device", "dtype", "kv_memory_mb"}
    models = {key: "" for key in (*CHECKPOINTS, "ngram_tables") if key != "target"}
    assert config.model_copy(update=models) == ServingConfig(target=config.target)


def test_config_every_drafter_of_a_method_is_a_key():
    assert set(CHECKPOINTS) == {"target", *DRAFTERS} <= set(ServingConfig.model_fields)


def test_key_that_was_renamed_is_refused_with_its_successor(tmp_path):
    file = tmp_path / "serving.toml"
    file.write_text('target = "owner/name"\nruns = false\n')
    with pytest.raises(ConfigError, match=r'runs has become placement: .*"separate" for false \(key runs in '):
        load_config(file, {})
