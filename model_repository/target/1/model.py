"""Triton model `target`: the target engine, which answers steps from its own thread, and the drafters of its runs."""

from functools import partial

from orchestrator.deployment.config import ServingConfig
from orchestrator.proposers.sources import RunProposers
from orchestrator.triton.clients import caller_beside
from orchestrator.triton.engine_host import EngineHost, EngineModel
from orchestrator.wire.target import StepRequest, TakeSteps, pack_answer, unpack_call
from runtime.engine.build import build_target
from runtime.engine.runs import Runs
from runtime.local_drafters import load_drafters


class TritonPythonModel(EngineModel):
    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[StepRequest | TakeSteps]:
        drafters = load_drafters(config) if config.has_runs else {}
        engine, model = build_target(config, caller_beside(args["model_repository"]))
        if config.has_runs:
            engine = Runs(engine, RunProposers(config, drafters))
        unpack = partial(unpack_call, vocab_size=model.vocab_size, max_nodes=config.max_nodes)
        return EngineHost(args["model_name"], engine, unpack, pack_answer, drafters)
