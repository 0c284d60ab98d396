"""A small audit of the shipped deployment in float64: no findings, and every rule had drafts to accept and to reject.

The full size is `make audit` (auditor/__main__.py, docs/auditor.md).
"""

from __future__ import annotations

import pytest

from auditor.auditor import Auditor
from auditor.reference_model import ReferenceModel
from auditor.server import AuditedServer
from auditor.workload import Size
from benchmarks.deployment import CONFIG, serving
from benchmarks.traffic import mixed_prompts
from orchestrator.core.deployment.config import load_config

pytestmark = pytest.mark.server

SETTINGS = ("none", "prompt_lookup", "draft_model 4", "ngram", "medusa leaves", "eagle2 small")
RULES = ("coupled", "rejection", "block")
SIZE = Size(prompts=2, tokens=12, seeds=16)
CHARACTERS = 120


def test_the_shipped_deployment_has_no_finding() -> None:
    prompts = [prompt.text[-CHARACTERS:] for prompt in mixed_prompts(SIZE.prompts)]
    with serving("float64") as server, AuditedServer(server.grpc_url) as system:
        results = Auditor(ReferenceModel(load_config(CONFIG).target), system, prompts, SIZE, SETTINGS).run()

    found = [f"{result.check}: {finding}" for result in results for finding in result.faults]
    by_name = {result.check: result.counts for result in results}
    assert not found, "\n".join(found)
    for rule in RULES:
        counts = by_name[f"replay, {rule}"]
        assert 0 < counts["accepted"] < counts["drafted"] and counts["steps"] >= 8
    for check in ("greedy", "invariance", "text, stopped", "log-probs", "distribution, block, draft_model 4"):
        assert by_name[check]["tokens"] > 0, check
