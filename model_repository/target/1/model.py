"""Triton model `target`: the target engine, which answers steps from its own thread, and the drafters of its runs."""

from functools import partial

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.messages.checks import checked_target_call
from orchestrator.core.messages.run import TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.tree import MAX_NODES
from orchestrator.drafting.sources import RunProposers
from orchestrator.server.clients import caller_beside
from orchestrator.server.engine_host import EngineHost, EngineModel
from runtime.engine.build_engines import build_target
from runtime.engine.local_drafters import load_drafters
from runtime.engine.runs import Runs


class TritonPythonModel(EngineModel):
    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[StepRequest | TakeSteps]:
        drafters = load_drafters(config) if config.is_colocated else {}
        engine, model = build_target(config, caller_beside(args["model_repository"]))
        if config.is_colocated:
            engine = Runs(engine, RunProposers(config, drafters, engine.pass_costs))
        checked = partial(checked_target_call, vocab_size=model.vocab_size, max_nodes=MAX_NODES)
        return EngineHost(args["model_name"], engine, checked, drafters)
