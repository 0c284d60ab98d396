"""What the proposers of one process draft from, and the proposers of an engine's runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from native.drafts import NativeEstimates
from native.response_memory import NativeMemory as NativeMemory  # the server holds one
from orchestrator.core.costs import PassCosts
from orchestrator.core.deployment.checkpoint import Checkpoint
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.engine_manifest import served_checkpoint
from orchestrator.core.grammar import Grammars
from orchestrator.core.grammar_matcher import Matcher
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Proposer
from orchestrator.core.worker_pool import WorkerPool
from orchestrator.drafting.adjacency import SharedMatrices
from orchestrator.drafting.corpus import load_corpus_index
from orchestrator.drafting.costs import StepCosts
from orchestrator.drafting.dependencies import DrafterClient, ProposerDependencies
from orchestrator.drafting.drafter_clients import Drafter, LocalDrafterClient
from orchestrator.drafting.registry import select_method
from orchestrator.drafting.tables import load_tables


class ProposerSources:
    """What the proposers of one process draft from, its grammars, and what it learns about steps and drafts.

    memory: earlier responses; None = the process remembers no responses. pass_costs: of the target, as measured at its
    load; None = not measured.
    """

    def __init__(
        self,
        config: ServingConfig,
        checkpoint: Checkpoint,
        memory: NativeMemory | None = None,
        pass_costs: PassCosts | None = None,
    ) -> None:
        self.grammars = Grammars(checkpoint.tokenizer_file, checkpoint.vocab_size, checkpoint.eos_ids)
        self._checkpoint, self._memory = checkpoint, memory
        self._has_cheap_rows = config.device != "cpu"
        self._step_costs, self._estimates = StepCosts(pass_costs), NativeEstimates()
        self._draft_max_sequences = config.draft_max_sequences
        self._corpus = load_corpus_index(config.corpus_index, checkpoint.tokenizer) if config.corpus_index else None
        self._matrices = SharedMatrices(checkpoint.vocab_size) if config.remember_tokens else None
        self._tables = load_tables(config.ngram_tables, checkpoint.tokenizer) if config.ngram_tables else None

    def dependencies(
        self,
        prediction: Sequence[int],
        max_nodes: int,
        cache_salt: str,
        drafter_client: Callable[[str], DrafterClient],
        matcher: Matcher | None = None,
    ) -> ProposerDependencies:
        """Return what the proposers of one request may draft from.

        drafter_client: makes the request's client of a drafter. matcher: of the request's grammar, if its drafts are
        pruned where they are proposed.
        """
        return ProposerDependencies(
            drafter_client=drafter_client,
            vocab_size=self._checkpoint.vocab_size,
            prediction=tuple(prediction),
            max_nodes=max_nodes,
            num_parameters=self._checkpoint.num_parameters,
            tables=self._tables,
            memory=self._memory.of(cache_salt) if self._memory else None,
            corpus=self._corpus,
            shared_adjacency=partial(self._matrices.of, cache_salt) if self._matrices else None,
            matcher=matcher,
            step_costs=self._step_costs,
            estimates=self._estimates,
            draft_max_sequences=self._draft_max_sequences,
            has_cheap_rows=self._has_cheap_rows,
        )


class RunProposers:
    """Builds the proposers of runs, in the process of the target's engine; any thread may call.

    They also propose tokens that a grammar forbids; the run removes them, on a thread that no other request waits for.

    drafters: those in this process, by name. pass_costs: of the target, as measured at its load; None = not measured.
    """

    def __init__(
        self,
        config: ServingConfig,
        drafters: Mapping[str, Drafter],
        pass_costs: PassCosts | None = None,
    ) -> None:
        self.memory = NativeMemory(config.remember_tokens) if config.remember_tokens else None
        self._sources = ProposerSources(config, served_checkpoint(config), self.memory, pass_costs)
        self._drafters = drafters
        self._learning: WorkerPool[None] = WorkerPool("memory", 1)
        self._limit_s = config.draft_timeout_ms / 1000

    def __call__(self, request: StepRequest) -> Proposer:
        """Return the proposer of a run; raises RequestError when the deployment lacks what it drafts from."""
        run, salt = request.run, request.delta.cache_salt
        assert run is not None
        dependencies = self._sources.dependencies(
            run.prediction,
            run.limits.max_nodes,
            salt,
            lambda name: LocalDrafterClient(name, self._drafters[name], salt, self._limit_s),
        )
        plan = select_method(run.method, run.config, frozenset(self._drafters), {})
        # A drafter's client observes the limit itself, and drafts again when the machine is less busy.
        return plan.proposer(dependencies, math.inf if plan.drafter else self._limit_s)

    def ended(self, request: StepRequest, output: Sequence[int]) -> None:
        """Remember the output of a run, on a thread that nobody waits for."""
        if self.memory and output:
            self._learning.start(partial(self.memory.learn, request.delta.cache_salt, output))
