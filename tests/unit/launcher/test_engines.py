"""The launcher's reading of what computes the models."""

from __future__ import annotations

from launcher.engines import kernels_of, with_kernels
from launcher.settings import free_ports

METRICS = """# TYPE spec_engine_info gauge
spec_engine_info{device="cpu",dtype="float32",engine="torch",kernels="native",model="target"} 1
spec_engine_info{kernels="torch",model="draft",device="cpu"} 1
spec_kv_blocks{model="target",state="held"} 3
"""


def test_each_model_has_its_kernels() -> None:
    assert kernels_of(METRICS) == {"target": "native", "draft": "torch"}


def test_a_port_that_does_not_answer_says_nothing() -> None:
    assert with_kernels(["target"], f"http://127.0.0.1:{free_ports().metrics}/metrics") == ["target"]
