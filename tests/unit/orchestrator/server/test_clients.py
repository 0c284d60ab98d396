"""Which Triton models of NVIDIA's backend may be called."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.errors import ConfigError
from tests.support.without_triton import imported


@pytest.mark.parametrize(
    ("policy", "is_refused"),
    [
        ("model_transaction_policy { decoupled: true }", True),
        ("model_transaction_policy {\n  decoupled : True\n}", True),
        ("model_transaction_policy { decoupled: false }", False),
        ("# decoupled: true", False),
    ],
)
def test_decoupled_model_is_refused_because_its_nested_calls_can_hang(
    tmp_path: Path, policy: str, is_refused: bool
) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm/config.pbtxt").write_text(f'name: "tensorrt_llm"\n{policy}\n')
    with imported("clients") as clients:
        caller = clients.caller_beside(str(tmp_path / "target"))
        if is_refused:
            with pytest.raises(ConfigError, match=r"must not be decoupled.*server#5988"):
                caller("tensorrt_llm")
        else:
            assert callable(caller("tensorrt_llm"))


def test_missing_model_is_named(tmp_path: Path) -> None:
    with imported("clients") as clients, pytest.raises(ConfigError, match=r"cannot read .*tensorrt_llm/config.pbtxt"):
        clients.caller_beside(str(tmp_path / "target"))("tensorrt_llm")
