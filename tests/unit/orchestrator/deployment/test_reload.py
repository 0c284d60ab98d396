"""Reloading: all processes take new settings over, or none; the engine's before the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from launcher.reloading import Reloader, changed_keys, described, stamps_of
from orchestrator.core.errors import ConfigError, ServingError
from orchestrator.deployment import reload as module
from orchestrator.deployment.config import FOLDERS, ServingConfig, load_config
from orchestrator.deployment.reload import Commit, Phase, Reload, ReloadListener

CONFIG = ServingConfig(target="t")
NEW = CONFIG.model_copy(update={"max_running": 3})


class Process:
    """A process that listens under an id of its own, and does what the test says."""

    def __init__(self, folder: Path, phase: Phase = Phase.COMMIT, error: Exception | None = None) -> None:
        self.error, self.config, self.changed = error, CONFIG, []
        self.listener = ReloadListener(folder, self.prepare, phase)

    def prepare(self, config: ServingConfig, changed: Collection[str]) -> Commit:
        if self.error:
            raise self.error
        self.changed = list(changed)

        def commit() -> None:
            self.config = config

        return commit


def ask(folder: Path, phase: Phase, *processes: Process) -> str:
    """Ask; each process looks once, under the id of this one."""
    reload, found = Reload(folder, 1, NEW, ["max_running"]), []
    asking = threading.Thread(target=lambda: found.append(reload.ask(phase, {os.getpid(): "m"}, 5.0)))
    asking.start()
    while asking.is_alive():
        for process in processes:
            process.listener.poll()
        asking.join(0.01)
    return found[0]


def test_settings_are_prepared_and_then_taken_over_by_the_engine_first(tmp_path: Path) -> None:
    engine, public = Process(tmp_path, Phase.COMMIT_ENGINE), Process(tmp_path)
    assert ask(tmp_path, Phase.PREPARE, engine, public) == ""
    assert (engine.config, public.config, engine.changed) == (CONFIG, CONFIG, ["max_running"])
    assert ask(tmp_path, Phase.COMMIT_ENGINE, engine, public) == ""
    assert (engine.config, public.config) == (NEW, CONFIG)
    assert ask(tmp_path, Phase.COMMIT, engine, public) == ""
    assert public.config == NEW


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("no such file"), "model m: no such file"),
        (KeyError("x"), "model m: internal error; the server's log"),
    ],
)
def test_a_process_that_cannot_prepare_says_why(tmp_path: Path, error: Exception, words: str) -> None:
    process = Process(tmp_path, error=error)
    assert ask(tmp_path, Phase.PREPARE, process).startswith(words)
    ask(tmp_path, Phase.COMMIT, process)
    assert process.config == CONFIG


def test_what_was_prepared_for_a_refused_reload_is_dropped(tmp_path: Path) -> None:
    """It may hold drafters, as large as those in use."""
    ready = Process(tmp_path)
    reloader = Reloader(CONFIG, lambda: NEW, tmp_path, 5.0)
    refused: list[str] = []

    def reload() -> None:
        with pytest.raises(ServingError) as caught:
            reloader.reload({os.getpid(): "speculative", 2**22 + 1: "speculative_unary"})
        refused.append(str(caught.value))

    asking = threading.Thread(target=reload)
    asking.start()
    while asking.is_alive():
        ready.listener.poll()
        asking.join(0.01)
    ready.listener.poll()
    assert refused == ["the process of model speculative_unary ended"] and reloader.config == CONFIG
    assert ready.listener._commit is None and ready.config == CONFIG


def test_a_process_that_was_started_later_ignores_what_was_asked_before(tmp_path: Path) -> None:
    ask(tmp_path, Phase.PREPARE, Process(tmp_path))
    late = Process(tmp_path, error=AssertionError("it has read the new file itself"))
    late.listener.poll()
    assert late.listener._commit is None


def test_a_process_that_is_gone_or_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reload = Reload(tmp_path, 1, NEW, [])
    assert reload.ask(Phase.PREPARE, {2**22 + 1: "target"}, 5.0) == "the process of model target ended"
    assert reload.ask(Phase.PREPARE, {os.getpid(): "target"}, 0.1) == "model target did not answer within 0.1 s"
    assert module.POLL_S < 1


def test_what_a_reload_may_change(tmp_path: Path) -> None:
    stamps = stamps_of(CONFIG)
    assert changed_keys(CONFIG, NEW, stamps, stamps) == ["max_running"]
    assert described(CONFIG, NEW, ["max_running", "draft"]) == "max_running 32 -> 3, draft (its files)"
    for update in ({"target": "u"}, {"dtype": "bfloat16"}, {"runs": False}):
        with pytest.raises(ConfigError, match=f"{next(iter(update))} cannot be changed .* rolling restart"):
            changed_keys(CONFIG, CONFIG.model_copy(update=update), stamps, stamps)
    apart = CONFIG.model_copy(update={"runs": False})
    with pytest.raises(ConfigError, match="draft cannot be changed"):
        changed_keys(apart, apart.model_copy(update={"draft": "d"}), stamps, stamps)
    with pytest.raises(ConfigError, match=r"target \(its files\): target cannot be changed"):
        changed_keys(CONFIG, CONFIG, stamps, stamps | {"target": 1})


def test_every_key_that_names_a_folder_starts_at_the_file_and_is_looked_into(tmp_path: Path) -> None:
    """Tables and corpora are read anew, drafters loaded anew, and of the target a reload says that it cannot."""
    values = {key: f"a folder/{key}" for key in FOLDERS}
    lines = [f'{key} = "{folder}"\n' for key, folder in values.items()]
    (tmp_path / "serving.toml").write_text("".join(lines))
    config = load_config(tmp_path / "serving.toml", {})
    assert {key: getattr(config, key) for key in FOLDERS} == {key: str(tmp_path / name) for key, name in values.items()}
    before = stamps_of(config)
    for key, folder in values.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").touch()
        after = stamps_of(config)
        if key == "target":
            with pytest.raises(ConfigError, match=r"target \(its files\)"):
                changed_keys(config, config, before, after)
        else:
            assert changed_keys(config, config, before, after) == [key]
        before = after
