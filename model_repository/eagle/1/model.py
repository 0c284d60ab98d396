"""Triton model `eagle`: an EAGLE head, which proposes a static tree (EAGLE-1) or a dynamic one (EAGLE-2) in a call."""

from orchestrator.server.engine_host import HeadModel
from runtime.models.heads.build_heads import build_head


class TritonPythonModel(HeadModel):
    build = staticmethod(build_head)
