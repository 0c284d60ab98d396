"""Triton model `redrafter`: a ReDrafter head, which proposes its beams as a tree in a call."""

from orchestrator.deployment.config import ServingConfig
from orchestrator.triton.engine_host import EngineHost, EngineModel, drafter_host
from orchestrator.wire.drafter import DraftRequest
from runtime.heads.build_heads import build_head


class TritonPythonModel(EngineModel):
    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[DraftRequest]:
        model = args["model_name"]
        return drafter_host(model, build_head(model, config))
