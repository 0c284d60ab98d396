"""Only the engine that `engine` names is imported; how large the caches are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from orchestrator.core.deployment.config import Engine, ServingConfig
from runtime.engine.build_engines import BUILDERS
from runtime.engine.torch_engine import build_target, load_draft
from tests.support.tiny_models import make_tiny_target

PROGRAM = """
import sys
from orchestrator.core.deployment.config import ServingConfig
from runtime.engine.build_engines import build_draft, build_target
config = ServingConfig(target=sys.argv[1], draft=sys.argv[1], kv_memory_mb=4)
for build in (build_target, build_draft):
    build(config)[0].close()
print(*(name for name in sys.modules if name.startswith(("runtime.trtllm", "tensorrt_llm"))))
"""


def test_every_engine_of_the_configuration_has_a_builder() -> None:
    assert set(BUILDERS) == set(get_args(Engine))


def test_torch_engine_imports_nothing_of_tensorrt_llm(tmp_path: Path) -> None:
    checkpoint = make_tiny_target(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(checkpoint)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_draft_model_has_room_for_as_many_tokens_as_the_target(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", num_hidden_layers=6)
    draft = make_tiny_target(tmp_path / "draft", num_hidden_layers=2)
    config = ServingConfig(target=str(target), draft=str(draft), kv_memory_mb=12)
    thread, model = build_target(config, None)  # type: ignore[arg-type]
    thread.close()
    blocks = model.new_cache(config.kv_memory_mb, config.block_tokens).num_blocks
    assert load_draft(config).paged.cache.num_blocks == pytest.approx(blocks, rel=0.01)


@pytest.mark.parametrize(("key", "num_tokens"), [(0, 256), (24, 24)])
def test_a_pass_reads_as_many_tokens_of_long_prompts_as_the_deployment_allows(
    tmp_path: Path, key: int, num_tokens: int
) -> None:
    config = ServingConfig(target=str(make_tiny_target(tmp_path)), kv_memory_mb=4, max_pass_tokens=key)
    thread, _ = build_target(config, None)  # type: ignore[arg-type]
    thread.close()
    assert thread._engine.paged.max_pass_tokens == num_tokens  # type: ignore[attr-defined]


def test_entry_point_imports_no_engine() -> None:
    program = "import sys, runtime.engine.build_engines; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", *BUILDERS.values()} & set(done.stdout.split())
