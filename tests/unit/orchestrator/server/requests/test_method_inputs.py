"""The drafting method of a request: its length, its drafter, a predicted output."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.core.context import Context
from orchestrator.core.deployment.capabilities import Capabilities
from orchestrator.core.errors import ConfigError
from orchestrator.server.inputs import MAX_TEXT_BYTES
from orchestrator.server.request_builder import RequestBuilder
from tests.support.request_building import CONTEXT, DEPLOYMENT, built, refusal
from tests.support.tiny_models import VOCAB_SIZE


def test_job_max_nodes_is_the_smaller_of_the_deployment_s_and_the_request_s(builder: RequestBuilder) -> None:
    for asked, allowed in ((None, 16), (3, 3), (0, 0), (100, 16)):
        job = built(builder, **({} if asked is None else {"speculation_config": json.dumps({"max_nodes": asked})}))
        assert job.limits.budget(Context(job.prompt)).max_nodes == allowed


def test_job_prediction_is_read_and_chooses_its_method(builder: RequestBuilder) -> None:
    for inputs in ({"draft_text": "bcd"}, {"draft_input_ids": [2, 3, 4]}):
        assert built(builder, **inputs).prediction == (2, 3, 4)
        assert built(builder, **inputs).plan.method == "auto"
        assert built(with_default(builder, "suffix"), **inputs).plan.method == "predicted"
        assert built(builder, speculation="predicted", **inputs).plan.method == "predicted"
    assert built(builder, draft_text="", draft_input_ids=[]).plan.method == DEPLOYMENT.default_speculation


def with_default(builder: RequestBuilder, method: str) -> RequestBuilder:
    return replace(builder, config=DEPLOYMENT.model_copy(update={"default_speculation": method}))


def test_auto_drafts_chains_where_a_rule_or_an_engine_takes_no_trees(builder: RequestBuilder) -> None:
    chains = replace(builder, capabilities=Capabilities(trees=False))
    for name in ("", "auto"):
        assert not built(builder, speculation=name).plan.config.is_chain
        for plan in (built(builder, speculation=name, rule="block").plan, built(chains, speculation=name).plan):
            assert plan.config.is_chain
            assert json.loads(plan.config_json) == {"tree": False}  # the target's process builds the same proposer
    asked = {"speculation": "auto", "speculation_config": '{"tree": true}'}
    assert "'auto' has tree true" in refusal(builder, **asked, rule="block")
    assert "'auto' with tree true" in refusal(chains, **asked)


def test_auto_is_the_engines_own_method_where_the_engine_takes_no_drafts(builder: RequestBuilder) -> None:
    for own, served in (("medusa", "medusa"), ("", "none")):
        engine = replace(builder, capabilities=Capabilities(drafts=False, max_nodes=0, engine_method=own))
        assert built(engine).plan.method == built(engine, speculation="auto").plan.method == served
        assert "does not serve the method 'auto'" in refusal(engine, draft_text="b")


def test_job_prediction_is_refused_when_it_cannot_be_used(builder: RequestBuilder) -> None:
    assert "exclude each other" in refusal(builder, draft_text="b", draft_input_ids=[2])
    assert "needs the expected output: draft_text or draft_input_ids" in refusal(builder, speculation="predicted")
    assert "for the methods 'predicted' and 'auto', got 'none'" in refusal(builder, speculation="none", draft_text="b")
    assert f"draft_input_ids must have ids in 0..{VOCAB_SIZE - 1}, got {VOCAB_SIZE}" in refusal(
        builder, draft_input_ids=[VOCAB_SIZE]
    )
    assert "draft_text has" in refusal(builder, draft_text="b" * (MAX_TEXT_BYTES + 1))
    for inputs in ({"draft_text": "b" * (CONTEXT + 1)}, {"draft_input_ids": [2] * (CONTEXT + 1)}):
        said = refusal(builder, **inputs)
        assert f"has {CONTEXT + 1} tokens, at most {CONTEXT} allowed" in said
    assert len(built(builder, draft_input_ids=[2] * CONTEXT).prediction) == CONTEXT


@pytest.mark.parametrize("method", ["magic", "draft_model", "predicted"])
def test_builder_default_method_that_no_request_could_use_fails_at_load(builder: RequestBuilder, method: str) -> None:
    with pytest.raises(ConfigError, match="default_speculation"):
        RequestBuilder(
            DEPLOYMENT.model_copy(update={"default_speculation": method}),
            builder.checkpoint,
            frozenset(),
            builder.grammars,
        )
