"""A small deployment, and requests that are built or refused for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import RequestError
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import read
from orchestrator.server.request_builder import RequestBuilder

CONTEXT = 32
EOS = 0
DEPLOYMENT = ServingConfig(target="t", draft="d", max_nodes=16, default_max_tokens=8, max_tokens_limit=20)


def built(builder: RequestBuilder, **inputs: Any) -> GenerationRequest:
    return builder.build(read({}, json.dumps({"text_input": "abc", **inputs})))


def refusal(builder: RequestBuilder, **inputs: Any) -> str:
    """Return the words of the refusal: one line that says where."""
    with pytest.raises(RequestError) as caught:
        given = read({}, json.dumps({"text_input": "abc", **inputs}))
        builder.timeout_ms(given)
        builder.build(given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 3000
    return str(caught.value)
