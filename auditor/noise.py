"""Check `noise`: the published test vector, bit-for-bit equality of numpy, torch and C++, and 0 < u < 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from auditor.reference import noise as numpy_noise
from auditor.results import Result
from native.sampling import sampler
from orchestrator.core.arrays import FloatArray
from orchestrator.core.noise import MASK32, Stream, philox
from runtime.engine.sampling import noise as torch_noise

Ints = npt.NDArray[np.int64]

NUM_KEYS = 100_000
#: g is at most 37, and torch's log is within a few ulp.
MAX_ROUNDING = 1e-12
LAST_BITS = (1 << 52) - 1
#: Random123's known answer for Philox4x32-10 with key and counter all zeros.
ZEROS_KEY_WORDS = (0x6627E8D5, 0xE169C58D)


def check_noise(num_keys: int = NUM_KEYS) -> Result:
    """Check the noise of this checkout; a server that runs elsewhere has its own."""
    result = Result("noise")
    _check_known_answer(result)
    _check_ends(result)
    _check_equality(result, num_keys)
    return result


def _check_known_answer(result: Result) -> None:
    word0, word1 = ZEROS_KEY_WORDS
    expected = ((word0 << 20 | word1 >> 12) + 0.5) * 2.0**-52
    zero = torch.zeros(1, dtype=torch.int64)
    got = {
        "numpy": float(numpy_noise.uniform(0, 0, 0, Stream.TARGET)),
        "torch": float(torch_noise.uniform((zero, zero), zero, zero, int(Stream.TARGET))),
    }
    for where, value in got.items():
        result.expect("known answer", where, expected, value)


def _check_ends(result: Result) -> None:
    """Check u of the bit patterns that are most likely to be rounded to 0 or 1."""
    ends = [0, 1, LAST_BITS - 1, LAST_BITS]
    units = {
        "numpy": numpy_noise.unit(np.array(ends, np.uint64)),
        "torch": torch_noise.unit(torch.tensor(ends)).numpy(),
    }
    for where, values in units.items():
        for bits, value in zip(ends, values.tolist(), strict=True):
            result.expect("0 < u < 1", f"{where}, bits {bits:#x}", True, 0.0 < value < 1.0)


def _check_equality(result: Result, num_keys: int) -> None:
    """Compare the served u with one computed here from numpy's words, for random keys and the largest seed."""
    rng = np.random.default_rng(1)
    seeds = [0, (1 << 64) - 1, *rng.integers(0, 1 << 63, 3).tolist()]
    for seed in seeds:
        places = [rng.integers(0, 1 << 32, num_keys // len(seeds)) for _ in range(3)]
        for stream in Stream:
            num_other = int((_numpy_units(seed, places, stream) != _torch_units(seed, places, stream)).sum())
            result.expect("numpy and torch agree", f"seed {seed}, stream {stream.name}", 0, num_other)
            result.counts["draws"] += len(places[0])
        _check_gumbel(result, seed, places)


def _check_gumbel(result: Result, seed: int, places: Sequence[Ints]) -> None:
    """Compare the target's g in numpy with that in torch, and in C++ if it is built."""
    position, tokens, _ = places
    expected = numpy_noise.gumbel(seed, position[0], tokens)
    at, of = torch.tensor(position[:1]), torch.from_numpy(tokens)
    key = torch.tensor([seed & MASK32]), torch.tensor([seed >> 32])
    found = sampler().noise([seed], position[:1].tolist(), tokens[None])[0]
    result.expect("numpy and C++ agree", f"seed {seed}, g", 0, int((found != expected).sum()))
    far = np.abs(torch_noise.gumbel(key, at, of).numpy() - expected) > MAX_ROUNDING
    result.expect("numpy and torch agree up to rounding", f"seed {seed}, g", 0, int(far.sum()))


def _numpy_units(seed: int, places: Sequence[Ints], stream: Stream) -> FloatArray:
    position, token, epoch = (place.astype(np.uint64) for place in places)
    word0, word1, _, _ = philox(seed, (position, token, np.asarray(stream, np.uint64), epoch))
    return numpy_noise.unit(word0 << np.uint64(20) | word1 >> np.uint64(12))


def _torch_units(seed: int, places: Sequence[Ints], stream: Stream) -> FloatArray:
    position, token, epoch = map(torch.from_numpy, places)
    key = torch.tensor(seed & MASK32), torch.tensor(seed >> 32)
    units: FloatArray = torch_noise.uniform(key, position, token, int(stream), epoch).numpy()
    return units
