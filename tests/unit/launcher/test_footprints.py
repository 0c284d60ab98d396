"""tests/support/footprints.py: what counts as growth in a soak, and how deaths within one tritonserver are counted."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.footprints import SHARED_MEMORY, TRITON, Footprint, Footprints, Sample, growth, table

pytestmark = pytest.mark.unit


def sample(triton: int = 1, num_deaths: int = 0, **of_target: float) -> Sample:
    """What a replica holds at rest after so many deaths; of_target: what its target holds instead of the usual."""
    target = Footprint(**{"mb": 436, "threads": 32, "descriptors": 5} | of_target)  # type: ignore[arg-type]
    of_triton = Footprint(49 + 4 * num_deaths, 277 + 83 * num_deaths, 68)
    shared = Footprint(3 + num_deaths, 0, 0)
    return Sample({"target": target, TRITON: of_triton, SHARED_MEMORY: shared}, triton, num_deaths)


def test_what_stays_as_it_is_is_no_growth() -> None:
    assert growth([sample()] * 5) == []


def test_a_saw_tooth_of_deaths_and_replacements_is_no_growth() -> None:
    assert growth([sample(triton, deaths) for triton in range(4) for deaths in range(17)]) == []


@pytest.mark.parametrize(("resource", "a_step"), [("mb", 2.0), ("threads", 2), ("descriptors", 2)])
def test_a_series_that_grows_is_named_with_its_kind_and_limits(resource: str, a_step: float) -> None:
    usual = getattr(sample().held["target"], resource)
    (line,) = growth([sample(**{resource: usual + a_step * number}) for number in range(41)])
    assert line.startswith(
        f"target holds {usual + 40 * a_step:.0f} {resource} at the end, {usual:.0f} after the warm-up"
    )


def test_a_tooth_whose_foot_rises_is_growth_even_if_the_last_one_is_low() -> None:
    risen = Sample({**sample(2).held, TRITON: Footprint(49, 900, 68)}, 2)
    (line,) = growth([sample(), sample(1, 16), risen, sample(3)])
    assert (
        line
        == "tritonserver holds 900 threads after a replacement of tritonserver, 277 after the warm-up, at most 477 allowed"
    )


def test_a_look_before_the_next_tritonserver_has_started_is_not_judged() -> None:
    between = Sample({SHARED_MEMORY: sample(1, 16).held[SHARED_MEMORY]})
    assert growth([sample(), sample(1, 16), between, sample(2)]) == []
    risen = Sample({**sample(2).held, SHARED_MEMORY: Footprint(19, 0, 0)}, 2)
    assert len(growth([sample(), sample(1, 16), between, risen, sample(3)])) == 1


def test_tritonserver_may_keep_no_more_than_its_deaths_explain() -> None:
    found = growth([sample(), Sample(sample(1, 12).held, 1, 2)])
    assert any(line.startswith("tritonserver holds 1273 threads at the end") for line in found)
    assert any(line.startswith("shared memory holds 15 mb") for line in found)


def test_a_peak_between_two_judged_moments_is_no_growth() -> None:
    assert growth([sample(), sample(threads=500), sample()]) == []


def test_a_process_that_is_gone_at_the_end_is_named() -> None:
    assert growth([sample(), Sample({TRITON: Footprint(49, 277, 68)}, 1)]) == [
        "at the end there is no target",
        "at the end there is no shared memory",
    ]


def test_deaths_are_counted_within_one_tritonserver() -> None:
    own, seen = os.getpid(), [{1: TRITON}]
    server: Any = SimpleNamespace(pids=lambda: seen[-1], shared_memory=lambda: {"a": 2_000_000, "b": 1_000_000})
    footprints = Footprints(server)
    for pids in ({own: TRITON, 8: "target"}, {own: TRITON, 9: "target"}, {own: TRITON, 9: "target"}, {1: TRITON}):
        seen.append(pids)
        footprints.look()
    assert [each.num_deaths for each in footprints.samples] == [0, 1, 1, 0]
    assert footprints.samples[0].held[SHARED_MEMORY].mb == 3
    assert "| shared memory | 3 / 3 / 3 | – | – |" in table(footprints.samples)
