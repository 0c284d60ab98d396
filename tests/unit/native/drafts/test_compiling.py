"""Building a C++ library: once per source, flags and processor, by one process, with reasons when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from native import compiling
from native.compiling import NativeLibrary, Unbuilt, compiler

SOURCE = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def library(tmp_path: Path) -> NativeLibrary:
    try:
        compiler()
    except Unbuilt as error:
        pytest.skip(str(error))
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    (tmp_path / "answer.cpp").write_text(SOURCE)
    return NativeLibrary("answer", tmp_path, ("answer.cpp",), ("answer.h",))


def built_files(library: NativeLibrary) -> list[Path]:
    return sorted((library.folder / "built").glob("*.so"))


def test_a_library_is_compiled_once(library: NativeLibrary) -> None:
    assert library.load().answer() == 42
    first = library.file.stat().st_mtime_ns
    assert library.build().stat().st_mtime_ns == first
    assert not [*(library.folder / "built").glob("*.part")]


@pytest.mark.parametrize("name", ["answer.h", "answer.cpp"])
def test_a_changed_file_is_compiled_anew(library: NativeLibrary, name: str) -> None:
    old = library.build()
    text = (library.folder / name).read_text()
    (library.folder / name).write_text(text.replace("42", "43") + "// changed\n")
    assert library.file != old
    assert library.load().answer() == (43 if name == "answer.h" else 42)


def test_other_flags_and_processors_have_files_of_their_own(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {library.file}
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-g"))
    files.add(library.file)
    monkeypatch.setattr(compiling, "_processor", lambda: "another")
    files.add(library.file)
    assert len(files) == 3


def test_processes_that_start_together_compile_once(library: NativeLibrary, tmp_path: Path) -> None:
    log, slow = tmp_path / "log", tmp_path / "slow"
    real = " ".join(compiler())
    slow.write_text(f'#!/bin/sh\necho run >> {log}\nsleep 0.5\nexec {real} "$@"\n')
    slow.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from native.compiling import NativeLibrary\n"
        f"library = NativeLibrary('answer', Path({str(tmp_path)!r}), ('answer.cpp',), ('answer.h',))\n"
        "sys.exit(0 if library.load().answer() == 42 else 1)"
    )
    started = [subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"CXX": str(slow)}) for _ in range(3)]
    assert [process.wait(timeout=60) for process in started] == [0, 0, 0]
    assert log.read_text().splitlines() == ["run", "run"]  # one source, and the link


def test_a_source_that_does_not_compile_is_a_reason(library: NativeLibrary) -> None:
    (library.folder / "answer.cpp").write_text("int answer( {")
    with pytest.raises(Unbuilt, match=r"failed: .*answer\.cpp.*error"):
        library.build()
    assert not built_files(library)


def test_no_compiler_is_a_reason(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling.sys, "executable", "/bin/false")
    with pytest.raises(Unbuilt, match="no C\\+\\+ compiler"):
        library.build()


def pretend(monkeypatch: pytest.MonkeyPatch, *instruction_sets: str) -> None:
    monkeypatch.setattr(compiling, "_processor", lambda: f"x86_64 flags : {' '.join(instruction_sets)}")


def test_an_image_has_a_library_for_each_level_and_a_processor_takes_the_best_that_it_runs(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {}
    for level in compiling.LEVELS:
        monkeypatch.setenv(compiling.LEVELS_VARIABLE, level)
        built[level] = library.file
        built[level].parent.mkdir(exist_ok=True)
        built[level].touch()
    monkeypatch.setenv(compiling.LEVELS_VARIABLE, ",".join(compiling.LEVELS))
    for level, instruction_sets in compiling.LEVELS.items():
        pretend(monkeypatch, *instruction_sets, "sse2")
        assert library.build() == built[level]
    assert len(set(built.values())) == len(compiling.LEVELS)


def test_a_level_with_products_of_bfloat16_is_its_base_and_one_instruction_set(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    monkeypatch.setattr(compiling.subprocess, "run", lambda command, **_: commands.append(command))
    for level in ("x86-64-v4-bf16", "x86-64-v3"):
        monkeypatch.setenv(compiling.LEVELS_VARIABLE, level)
        with pytest.raises(Unbuilt):  # nothing was compiled
            library.build()
    targets = [[option for option in command if option.startswith("-m")] for command in commands]
    compiled, linked = targets[::2], targets[1::2]
    assert compiled == linked == [["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"], ["-march=x86-64-v3"]]
