"""Every command that the documentation shows is run, checked, or says why not (docs/commands.md).

<!-- run -->            the test runs the block, each line in turn, from the repository's root
<!-- run: ci -->        `make` targets that CI or a person runs; here `make -n` must know them
<!-- dry: make -->      `make -n` must accept it
<!-- dry: python -->    the script's own argument parser must accept it
<!-- unrun: why -->     not checked, for the reason given
"""

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from orchestrator.core.deployment.config import ServingConfig

ROOT = Path(__file__).resolve().parents[3]
SHELLS = ("bash", "sh", "shell", "console")
FENCE = re.compile(
    r"^(?P<indent> *)(```+|~~~+)(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)\2 *$", re.DOTALL | re.MULTILINE
)
MARKER = re.compile(r"<!-- (run|run: ci|dry: make|dry: python|unrun: \S[^\n]*) -->")
ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)")


class Block(NamedTuple):
    where: str
    language: str
    marker: str | None
    body: str


def blocks(path):
    """Yield the fenced blocks of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        above = text[: fence.start()].rstrip("\n").rpartition("\n")[2].strip()
        marker = MARKER.fullmatch(above)
        line = text.count("\n", 0, fence.start()) + 1
        yield Block(f"{path.name}:{line}", fence["language"], marker and marker[1], fence["body"])


def commands(body):
    """Return a block's commands: continued lines joined, prompts and comments left out."""
    lines = (line.strip().removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def documents():
    return [
        path
        for path in (
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            ROOT / "build" / "README.md",
            *sorted((ROOT / "docs").rglob("*.md")),
        )
        if path.exists()
    ]


ALL = [block for path in documents() for block in blocks(path)]
SHELL = [block for block in ALL if block.language in SHELLS]


def run(command, **options):
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
        **options,
    )
    assert done.returncode == 0, f"{command}: {done.stderr or done.stdout}"


def without_assignments(command):
    """Split a command; leave out the variables before it, after a look at those that are ours."""
    words = shlex.split(command, comments=True)
    while words and (assignment := ASSIGNMENT.fullmatch(words[0])):
        name = words.pop(0) and assignment[1]
        if name.startswith("SERVING_"):
            assert name.removeprefix("SERVING_").lower() in ServingConfig.model_fields, name
    return words


class Parsed(Exception):
    """The script's parser has accepted its arguments."""


def check_make(words):
    assert words[0] == "make", words
    run(["make", "-n", *words[1:]])


def check_python(words, monkeypatch):
    """Run a script just until its parser has taken the arguments."""
    assert re.fullmatch(r"(\.venv/bin/)?python3?", words[0]), f"not a Python script: {words}"
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(self, *given, **named):
        parse(self, *given, **named)
        raise Parsed

    script, is_module = (words[2], True) if words[1] == "-m" else (words[1], False)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.setattr(sys, "argv", [script, *words[2 + is_module :]])
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    with pytest.raises(Parsed):
        if is_module:
            for name in (script, f"{script}.__main__"):  # another test may have imported it
                if not hasattr(sys.modules.get(name), "__path__"):  # a package stays: its modules know it
                    monkeypatch.delitem(sys.modules, name, raising=False)
            runpy.run_module(script, run_name="__main__", alter_sys=False)
        else:
            runpy.run_path(str(ROOT / script), run_name="__main__")


def check(block, monkeypatch):
    if block.marker == "run":
        run(["bash", "-euo", "pipefail", "-c", "\n".join(commands(block.body))])
        return
    for command in commands(block.body):
        if block.marker in ("run: ci", "dry: make"):
            check_make(without_assignments(command))
        elif block.marker == "dry: python":
            check_python(without_assignments(command), monkeypatch)


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.where)
def test_docs_block_names_its_language_and_a_command_its_check(block):
    assert block.language, f"{block.where}: name the block's language (text, if none)"
    assert block.language not in SHELLS or block.marker, (
        f"{block.where}: put a marker above the block (docs/commands.md)"
    )


@pytest.mark.parametrize("block", [block for block in SHELL if block.marker], ids=lambda block: block.where)
def test_docs_command_passes_its_check(block, monkeypatch):
    check(block, monkeypatch)
