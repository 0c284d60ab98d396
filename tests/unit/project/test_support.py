"""What the tests of servers rely on: the metric that is asked for, and the end of a stand-in's stream."""

from __future__ import annotations

import pytest

from tests.support.clients import series_in

METRICS = """\
# TYPE spec_sequences gauge
spec_sequences{previous_model="target",model="draft",version="1"} 1
spec_sequences{model="target2",version="1"} 2
spec_sequences{version="1",model="target"} 3
spec_sequences_total{model="target",state="a,\\"b\\""} 4
"""


def test_a_metric_is_the_one_whose_labels_are_the_ones_asked_for() -> None:
    assert series_in(METRICS, "spec_sequences", model="target") == 3
    assert series_in(METRICS, "spec_sequences", model="target2") == 2
    assert series_in(METRICS, "spec_sequences_total", state='a,\\"b\\"') == 4
    with pytest.raises(AssertionError, match="no series"):
        series_in(METRICS, "spec_sequences", model="tar")
