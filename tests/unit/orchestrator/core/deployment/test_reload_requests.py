"""Reloading: all processes take new settings over, or none; the engine's before the others."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.reloader import Reloader, changed_keys, described, stamps_of
from orchestrator.core.deployment import reload_requests as module
from orchestrator.core.deployment.config import FOLDERS, ServingConfig, load_config
from orchestrator.core.deployment.reload_requests import Commit, Phase, Reload, ReloadListener
from orchestrator.core.errors import ConfigError, ServingError

CONFIG = ServingConfig(target="t")
NEW = CONFIG.model_copy(update={"max_running": 3})


class Process:
    """A process that listens under an id of its own, and does what the test says."""

    def __init__(self, folder: Path, phase: Phase = Phase.COMMIT, error: Exception | None = None) -> None:
        self.error, self.config, self.changed = error, CONFIG, []
        self.commit_error: Exception | None = None
        self.listener = ReloadListener(folder, self.prepare, phase)

    def prepare(self, config: ServingConfig, changed: Collection[str]) -> Commit:
        if self.error:
            raise self.error
        self.changed = list(changed)

        def commit() -> None:
            if self.commit_error:
                raise self.commit_error
            self.config = config

        return commit


def ask(folder: Path, phase: Phase, *processes: Process) -> str:
    """Ask; each process looks once, under the id of this one."""
    reload, found = Reload(folder, 1, NEW, ["max_running"]), list[str]()
    asking = threading.Thread(target=lambda: found.append("".join(reload.ask(phase, {os.getpid(): "m"}, 5.0).values())))
    asking.start()
    while asking.is_alive():
        for process in processes:
            process.listener.poll()
        asking.join(0.01)
    return found[0]


def no_restart(pid: int) -> None:
    pytest.fail(f"{pid} was restarted")


def poll_during(call: Callable[[], object], *processes: Process) -> None:
    """Let the processes look, under the id of this one, while another thread makes a call."""
    asking = threading.Thread(target=call)
    asking.start()
    while asking.is_alive():
        for process in processes:
            process.listener.poll()
        asking.join(0.01)


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
            reloader.reload({os.getpid(): "speculative", 2**22 + 1: "speculative_unary"}, no_restart)
        refused.append(str(caught.value))

    poll_during(reload, ready)
    ready.listener.poll()
    assert refused == ["the process of model speculative_unary ended"] and reloader.config == CONFIG
    assert ready.listener._commit is None and ready.config == CONFIG


def test_a_process_that_does_not_commit_is_restarted_and_the_reload_applied(tmp_path: Path) -> None:
    """The engine has the new settings by then: to report that nothing has changed would be wrong."""
    public = Process(tmp_path)
    public.commit_error = OSError("no memory")
    restarted: list[int] = []
    reloader = Reloader(CONFIG, lambda: NEW, tmp_path, 60.0)
    done: list[str] = []
    poll_during(lambda: done.append(reloader.reload({os.getpid(): "speculative"}, restarted.append)), public)
    assert done == [
        "reload: max_running 32 -> 3; restarted to apply it: model speculative: internal error; the server's log has "
        "the cause"
    ]
    assert reloader.config == NEW and restarted == [os.getpid()]
    assert reloader.reload({}, no_restart) == "reload: nothing has changed"


def test_a_process_that_ends_or_is_silent_between_the_phases_is_restarted(tmp_path: Path) -> None:
    restarted: list[int] = []
    reloader = Reloader(CONFIG, lambda: NEW, tmp_path, 0.1)
    reload = Reload(tmp_path, 1, NEW, ["max_running"])
    failed = reloader._commit(reload, {2**22 + 1: "target", os.getpid(): "speculative"}, restarted.append)
    assert failed == {
        2**22 + 1: "the process of model target ended",
        os.getpid(): "model speculative did not answer within 0.1 s",
    }
    assert restarted == list(failed)


def test_an_answer_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk used to end the thread, and every later reload waited in vain."""
    process, writes = Process(tmp_path), []
    written = module._write

    def write(file: Path, message: Mapping[str, Any]) -> None:
        writes.append(file.name)
        if writes.count(f"reload-answer-{os.getpid()}") == 1:
            raise OSError(errno.ENOSPC, "no space left on device")
        written(file, message)

    monkeypatch.setattr(module, "_write", write)
    assert ask(tmp_path, Phase.PREPARE, process) == ""
    assert ask(tmp_path, Phase.COMMIT, process) == "" and process.config == NEW


def test_a_request_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    reloader = Reloader(CONFIG, lambda: NEW, tmp_path / "none", 5.0)
    with pytest.raises(ServingError, match=r"model speculative could not be asked: .*No such file"):
        reloader.reload({os.getpid(): "speculative"}, no_restart)
    assert reloader.config == CONFIG


def test_a_process_that_was_started_later_ignores_what_was_asked_before(tmp_path: Path) -> None:
    ask(tmp_path, Phase.PREPARE, Process(tmp_path))
    late = Process(tmp_path, error=AssertionError("it has read the new file itself"))
    late.listener.poll()
    assert late.listener._commit is None


def test_a_process_that_is_gone_or_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reload = Reload(tmp_path, 1, NEW, [])
    ended, silent = {2**22 + 1: "target"}, {os.getpid(): "target"}
    assert [*reload.ask(Phase.PREPARE, ended, 5.0).values()] == ["the process of model target ended"]
    assert [*reload.ask(Phase.PREPARE, silent, 0.1).values()] == ["model target did not answer within 0.1 s"]
    assert module.POLL_S < 1


def test_what_a_reload_may_change(tmp_path: Path) -> None:
    stamps = stamps_of(CONFIG)
    assert changed_keys(CONFIG, NEW, stamps, stamps) == ["max_running"]
    assert described(CONFIG, NEW, ["max_running", "draft"]) == "max_running 32 -> 3, draft (its files)"
    for update in ({"target": "u"}, {"dtype": "bfloat16"}, {"placement": "separate"}):
        with pytest.raises(ConfigError, match=f"{next(iter(update))} cannot be changed .* rolling restart"):
            changed_keys(CONFIG, CONFIG.model_copy(update=update), stamps, stamps)
    apart = CONFIG.model_copy(update={"placement": "separate"})
    with pytest.raises(ConfigError, match="draft cannot be changed"):
        changed_keys(apart, apart.model_copy(update={"draft": "d"}), stamps, stamps)
    with pytest.raises(ConfigError, match=r"target \(its files\): target cannot be changed"):
        changed_keys(CONFIG, CONFIG, stamps, stamps | {"target": (("config.json", 2, 1),)})


def keep_time(file: Path, change: Callable[[], object]) -> None:
    """Change a file without changing its time, as `cp -p` of an older one may."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    change()
    os.utime(file, ns=times)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "old").unlink(),
        lambda folder: (folder / "old").rename(folder / "other"),
        lambda folder: keep_time(folder / "old", lambda: (folder / "old").write_text("longer")),
        lambda folder: os.utime(folder / "old", (1, 1)),
        lambda folder: (folder / "below/file").write_text("longer"),
        lambda folder: (folder / "below/new").touch(),
    ],
    ids=["deleted", "renamed", "another size", "older", "below", "new below"],
)
def test_any_change_of_a_folder_s_files_is_seen(tmp_path: Path, change: Callable[[Path], object]) -> None:
    (tmp_path / "below").mkdir()
    for name in ("newest", "old", "below/file"):
        (tmp_path / name).write_text("text")
    os.utime(tmp_path / "old", (1000, 1000))
    (tmp_path / "dangling").symlink_to("nothing")
    config = CONFIG.model_copy(update={"ngram_tables": str(tmp_path)})
    before = stamps_of(config)
    assert changed_keys(config, config, before, stamps_of(config)) == []
    change(tmp_path)
    assert changed_keys(config, config, before, stamps_of(config)) == ["ngram_tables"]


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
