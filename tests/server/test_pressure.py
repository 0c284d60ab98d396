"""A server with KV blocks for two requests gets eight: each ends with the text that it has alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import deployment, serving
from tests.support.clients import Stream, ask, infer, metric, until
from tests.support.tiny_models import make_tiny_target

METHODS = ("none", "prompt_lookup", "suffix", "none")
LENGTH = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pressure")
    make_tiny_target(folder / "target", max_position_embeddings=4096)
    return folder


def test_preempted_requests_end_with_the_text_that_they_have_alone(folder: Path) -> None:
    requests = [
        {
            "text_input": "abcdefgh"[number:] * (30 + number),
            "speculation": METHODS[number % len(METHODS)],
            "temperature": 0.8 * (number % 2),
            "seed": number,
            "max_tokens": LENGTH,
            "ignore_eos": True,
        }
        for number in range(8)
    ]
    lines = ('default_speculation = "none"', "prefix_sharing = false")
    config = deployment(folder, *lines)
    config.write_text(config.read_text().replace("kv_memory_mb = 32", "kv_memory_mb = 1"))
    with serving(config) as server:
        alone = [ask(server.grpc_url, **request).last for request in requests]
        assert metric(server.metrics_url, "spec_preemptions_total", model="target") == 0
        with Stream(server.grpc_url) as stream:
            for number, request in enumerate(requests):
                stream.send(str(number), **request)
            together = stream.answers(*map(str, range(8)))
        for number, expected in enumerate(alone):
            answer = together[str(number)].last
            assert answer["output_ids"] == expected["output_ids"] and answer["finish_reason"] == "length"
        until(
            lambda: metric(server.metrics_url, "spec_preemptions_total", model="target") > 0,
            "a preemption: the blocks were enough for all",
        )
        refused = infer(server.http_url, text_input="abc", max_tokens=4000)
        assert refused.status == 400 and "the pool holds" in refused.error and "kv_memory_mb" in refused.error
        until(
            lambda: metric(server.metrics_url, "spec_kv_blocks", model="target", state="held") == 0,
            "the end of the sequences",
        )
