"""The checks behind `make setup`, `make lint` and `make size`."""

from collections import namedtuple
from pathlib import Path

import pytest

from tools import check_host, layers, size

ROOT = Path(__file__).resolve().parents[3]


def test_layers_this_repository_keeps_to_them():
    assert layers.violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "line", "words"),
    [
        ("orchestrator/server/loop.py", "import torch", "orchestrator may not import torch"),
        ("orchestrator/server/loop.py", "def f():\n    from torch.nn import functional", "x.py"),
        ("orchestrator/core/tree.py", "from orchestrator.server.loop import generate", "orchestrator/core may import"),
        ("orchestrator/core/tree.py", "from orchestrator import drafting", "orchestrator/core may import"),
        ("orchestrator/core/tree.py", "from . import loop", "imports are absolute"),
        (
            "orchestrator/drafting/none.py",
            "import triton_python_backend_utils as pb_utils",
            "only orchestrator/server",
        ),
        (
            "orchestrator/novel.py",
            "from orchestrator.core.tree import TokenTree",
            "orchestrator/novel.py is not a layer",
        ),
        ("runtime/engine/engine.py", "from orchestrator.server.loop import generate", "runtime/engine may import"),
        ("runtime/engine.py", "import triton_python_backend_utils", "runtime may not import"),
        ("launcher/server.py", "from orchestrator.drafting.none import Plain", "launcher may import"),
        ("launcher/server.py", "import numpy", "launcher may not import numpy"),
        ("clients/generate.py", "from orchestrator.core.errors import ServingError", "clients may not import"),
        ("gateway/app.py", "from orchestrator.core.errors import ServingError", "gateway may not import"),
        ("gateway/triton.py", "import launcher", "gateway may not import launcher"),
        ("runtime/engine.py", "import build.recipe", "runtime may not import build.recipe"),
        ("model_repository/target/1/model.py", "import torch", "model_repository may not import torch"),
        ("auditor/replay.py", "from tests.support.engines import ask", "auditor may not import tests"),
        ("benchmarks/server.py", "from tests.exact import CONFIG", "benchmarks may not import tests"),
        ("benchmarks/server.py", "from auditor.auditor import Auditor", "benchmarks may not import auditor"),
    ],
)
def test_layers_import_that_goes_up_is_found(tmp_path, path, line, words):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    (found,) = layers.violations(tmp_path)
    assert found.startswith(f"{path}:") and words.replace("x.py", "torch.nn") in found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("orchestrator/server/pb.py", "import triton_python_backend_utils"),
        ("orchestrator/server/loop.py", "from orchestrator.server.text import Chunk"),
        ("orchestrator/drafting/none.py", "from orchestrator.drafting.base import Base"),
        ("runtime/engine/engine.py", "import torch\nfrom orchestrator.core.tree import TokenTree"),
        ("launcher/server.py", "from orchestrator.core.deployment.config import load_config"),
        ("clients/demo.py", "import launcher"),
        ("auditor/replay.py", "import torch\nfrom benchmarks.traffic import ask\nimport clients.generate"),
    ],
)
def test_layers_import_that_goes_down_passes(tmp_path, path, line):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    assert layers.violations(tmp_path) == []


def test_check_host_each_lack_is_one_line_that_says_what_to_do(monkeypatch, tmp_path):
    version = namedtuple("version", "major minor")
    monkeypatch.setattr(check_host.platform, "libc_ver", lambda: ("glibc", "2.31"))
    monkeypatch.setattr(check_host.sys, "version_info", version(3, 14))
    monkeypatch.setattr(check_host.shutil, "disk_usage", lambda folder: namedtuple("usage", "free")(2**30))
    said = check_host.problems(str(tmp_path))
    assert len(said) == 4 and not any("\n" in line for line in said)
    assert "needs glibc >= 2.35" in said[0] and "glibc 2.31" in said[0]
    assert "make setup PYTHON=python3.12" in said[1]
    assert "apt install libpython3.14" in said[2]
    assert "4 GiB of free disk are needed, 1.0 are left" in said[3]


def test_check_host_other_platform_is_sent_to_the_container(monkeypatch):
    monkeypatch.setattr(check_host.platform, "machine", lambda: "arm64")
    assert "use the container" in check_host._platform()


def test_size_counts_functions_short_and_long_files_by_folder_without_the_tests(tmp_path, capsys):
    function = "def f():\n    return 1\n"
    sources = {
        "launcher/__init__.py": "",
        "launcher/short.py": function,
        "runtime/engine/kv/long.py": function * 150 + "\n",
        "tests/test_short.py": function,
        ".venv/hidden.py": function,
    }
    for path, source in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)

    assert size.main([str(tmp_path)]) == 0

    titles, *rows = (line.split() for line in capsys.readouterr().out.replace("< 40", "short").splitlines())
    assert titles[:6] == ["folder", "files", "lines", "code", "functions", "median"]
    assert rows == [
        ["launcher/", "2", "2", "2", "1", "2", "2", "2", "1", "0"],
        ["runtime/", "1", "301", "300", "150", "2", "2", "2", "0", "1"],
        ["all", "3", "303", "302", "151", "2", "2", "2", "1", "1"],
    ]
