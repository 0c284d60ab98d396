"""Noise: the published Philox vectors, the distributions of u and g, and independence of the keys."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from auditor.reference.noise import gumbel, uniform
from orchestrator.core.noise import Stream, child_seed, philox

# Known-answer vectors of Random123 (philox 4x32, 10 rounds): counter, key, output.
VECTORS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        0xFFFFFFFFFFFFFFFF,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: int, expected: tuple[int, ...]) -> None:
    words = philox(key, tuple(np.array([word], np.uint64) for word in counter))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in words) == expected


def test_uniform_is_made_of_word_0_and_the_upper_bits_of_word_1() -> None:
    words = philox(77, tuple(np.array([word], np.uint64) for word in (5, 9, 2, 3)))  # type: ignore[arg-type]
    bits = int(words[0][0]) << 20 | int(words[1][0]) >> 12
    assert uniform(77, [5], [9], Stream.ACCEPT, 3)[0] == (bits + 0.5) * 2.0**-52


def test_uniform_is_never_0_or_1() -> None:
    lowest, highest = 0.5 * 2.0**-52, (2**52 - 0.5) * 2.0**-52
    assert lowest > 0.0
    assert highest < 1.0
    assert np.isfinite(-np.log(-np.log(np.array([lowest, highest])))).all()


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    sample = gumbel(11, np.arange(500)[:, None], np.arange(400)[None, :]).ravel()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("change", ["seed", "position", "token", "stream", "epoch"])
def test_every_part_of_the_key_changes_the_noise(change: str) -> None:
    base = {"seed": 3, "position": 10, "token": 20, "stream": 1, "epoch": 7}
    other = base | {change: base[change] + 1}
    draws = [uniform(k["seed"], k["position"], k["token"], Stream(k["stream"]), k["epoch"]) for k in (base, other)]
    assert draws[0] != draws[1]


def test_neighbouring_keys_are_uncorrelated() -> None:
    u = uniform(5, np.arange(300)[:, None], np.arange(300)[None, :], Stream.TARGET)
    for shifted in (u[1:].ravel(), u[:, 1:].ravel()):
        size = len(shifted)
        assert abs(np.corrcoef(u.ravel()[:size], shifted)[0, 1]) < 5 / np.sqrt(size)


def test_child_seeds_differ_and_the_first_is_the_request_s_own() -> None:
    seeds = [child_seed(42, i) for i in range(100)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 100
