"""Triton model `target`: the target engine, which answers steps from its own thread."""

from functools import partial

from orchestrator.deployment.config import ServingConfig
from orchestrator.triton.clients import caller_beside
from orchestrator.triton.engine_host import EngineHost, EngineModel
from orchestrator.wire.target import StepRequest, pack_acceptance, unpack_step
from runtime.engine.build import build_target


class TritonPythonModel(EngineModel):
    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[StepRequest]:
        engine, model = build_target(config, caller_beside(args["model_repository"]))
        unpack = partial(unpack_step, vocab_size=model.vocab_size, max_nodes=config.max_nodes)
        return EngineHost(args["model_name"], engine, unpack, pack_acceptance)
