"""Triton model `target`: the target engine, which answers steps from its own thread, and the drafters of its runs."""

from collections.abc import Collection
from functools import partial

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.reload_requests import Commit, Phase, ReloadListener
from orchestrator.core.messages.target import StepRequest, TakeSteps, pack_answer, unpack_call
from orchestrator.core.tree import MAX_NODES
from orchestrator.drafting.sources import RunProposers
from orchestrator.server.clients import caller_beside
from orchestrator.server.engine_host import EngineHost, EngineModel
from runtime.engine.build_engines import build_target
from runtime.engine.local_drafters import load_drafters, reloaded
from runtime.engine.runs import Runs


class TritonPythonModel(EngineModel):
    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[StepRequest | TakeSteps]:
        self._drafters = load_drafters(config) if config.is_colocated else {}
        engine, model = build_target(config, caller_beside(args["model_repository"]))
        if config.is_colocated:
            self._pass_costs = engine.pass_costs
            self._proposers = RunProposers(config, self._drafters, self._pass_costs)
            engine = self._runs = Runs(engine, self._proposers)
            ReloadListener.start(partial(self._prepare_reload, config), Phase.COMMIT_ENGINE)
        # Only the loop's process knows max_nodes, which a reload may change.
        unpack = partial(unpack_call, vocab_size=model.vocab_size, max_nodes=MAX_NODES)
        return EngineHost(args["model_name"], engine, unpack, pack_answer, self._drafters)

    def _prepare_reload(self, loaded: ServingConfig, config: ServingConfig, changed: Collection[str]) -> Commit:
        drafters = reloaded(self._drafters, loaded, config, changed)
        memory = None if "remember_tokens" in changed else self._proposers.memory
        proposers = RunProposers(config, drafters, self._pass_costs, memory)

        def commit() -> None:
            self._drafters, self._proposers = drafters, proposers
            self._runs.use(proposers)
            self._host.show_drafters(drafters, config)

        return commit
