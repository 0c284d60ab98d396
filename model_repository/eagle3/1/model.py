"""Triton model `eagle3`: an EAGLE-3 head, which proposes a dynamic tree in a call."""

from orchestrator.server.engine_host import HeadModel
from runtime.models.heads.build_heads import build_head


class TritonPythonModel(HeadModel):
    build = staticmethod(build_head)
