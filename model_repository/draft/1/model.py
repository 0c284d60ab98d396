"""Triton model `draft`: the draft language model, which proposes a chain in a call."""

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.server.clients import caller_beside
from orchestrator.server.engine_host import EngineHost, EngineModel, drafter_host
from runtime.engine.build_engines import build_draft


class TritonPythonModel(EngineModel):
    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[DraftRequest]:
        engine, _ = build_draft(config, caller_beside(args["model_repository"]))
        return drafter_host(args["model_name"], engine)
