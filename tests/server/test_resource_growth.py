"""The measurement of growth at CI size, on tiny random models, whose steps are so cheap that many fit into a minute.

The full size, on the shipped deployment: `python -m tests.resource_growth`.
"""

from collections.abc import Iterator

import pytest

from launcher import Server
from tests.resource_growth import CONFIG, Growth, watch_growth
from tests.support.tiny_models import make_tiny_target

pytestmark = [pytest.mark.server, pytest.mark.long]

WARM_UP, MEASURED = 600, 1800
SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 2048, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Growth]:
    target = make_tiny_target(tmp_path_factory.mktemp("target"), **SHAPE)
    draft = make_tiny_target(tmp_path_factory.mktemp("draft"), **SHAPE)  # the same: all its drafts are accepted
    # Pools of 12 MB have room for eight of the longest requests, and the warm-up fills them.
    sizes = {"SERVING_KV_MEMORY_MB": "12", "SERVING_NGRAM_TABLES": "", "SERVING_REMEMBER_TOKENS": "2000"}
    heads = {f"SERVING_{name}": "" for name in ("MEDUSA", "EAGLE", "EAGLE3", "REDRAFTER")}  # those of another target
    with Server(CONFIG, env={"SERVING_TARGET": str(target), "SERVING_DRAFT": str(draft), **sizes, **heads}) as server:
        yield watch_growth(server, WARM_UP, MEASURED, num_parts=3)


def test_mixed_traffic_grows_nothing_and_leaves_nothing_held(result: Growth) -> None:
    print(result.table())

    assert not result.faults()


def test_traffic_was_mixed_and_measured(result: Growth) -> None:
    assert result.num_steps[-1] - result.num_steps[0] >= MEASURED
    assert set(result.outcomes) == {"finish", "cancel", "deadline", "refused", "http"}
    assert all(count >= 10 for count in result.outcomes.values())
    assert len(result.samples[-1].held) == 4  # blocks and sequences, of the target and of the draft
    assert {name for _, name in result.samples[-1].rss_mb} >= {"tritonserver", "target", "speculative"}
