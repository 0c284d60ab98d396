"""Triton model `medusa`: Medusa's heads, which propose a static tree in a call."""

from orchestrator.server.engine_host import HeadModel
from runtime.models.heads.build_heads import build_head


class TritonPythonModel(HeadModel):
    build = staticmethod(build_head)
