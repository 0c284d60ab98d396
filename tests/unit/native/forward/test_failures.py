"""Exceptions of native code, most of them of memory: they become errors of Python and do not end the process.

Sizes that no memory can have stand for memory that is lacking.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native import drafts_library, sampling
from native.drafts_library import PromptLookupOptions
from native.failures import made
from native.library import LIBRARY, Shape, load
from native.sampling import Rows
from orchestrator.core.errors import EngineError
from orchestrator.core.proposal import NativeDrafts
from orchestrator.core.sampling_params import Sampling
from runtime.engine.target import TargetEngine
from tests.support.engines import make_paged
from tests.support.tiny_models import make_tiny_target
from tests.unit.native.forward.test_sanitizers import COMPILER, FLAGS, needs_compiler
from tests.unit.runtime.engine.test_bursts import Sequence

HUGE = 1 << 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), hidden_size=64, intermediate_size=80, head_dim=16)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_sampling_without_memory_is_an_error(num_threads: int) -> None:
    native = sampling.sampler()
    rows, samplings = Rows.of(np.zeros((4, 1))), [Sampling(1.0)] * 4
    with pytest.raises(EngineError, match="sampling failed in native code: a size is beyond all memory"):
        native.target_tokens(Rows(rows.address, "float64", rows), HUGE, range(4), samplings, num_threads)
    with pytest.raises(EngineError, match="beyond all memory"):
        native.log_probs(Rows(rows.address, "float64", rows), HUGE, [0])
    assert native.target_tokens(rows, 1, range(4), samplings, num_threads) == [0] * 4


def test_a_draw_without_memory_is_an_error() -> None:
    assert sampling.sampler()._draw(None, None, HUGE, 0, 0, 0, 0, 1, None) == b"a size is beyond all memory"


READS_UNTIL_MEMORY_ENDS = """
import resource
from orchestrator.core.errors import EngineError
from native.drafts import native_suffix
from native.drafts_library import SuffixOptions

proposer = native_suffix(SuffixOptions(8, 4, False, 4.0, 0.1))
piece = list(range(2048))
proposer.next(piece, 0, 0)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (32 << 20),) * 2)
try:
    for _ in range(2000):
        proposer.next(piece, 8, 8)
except EngineError as error:
    print(error)
"""


def test_a_proposer_without_memory_is_an_error() -> None:
    command = [sys.executable, "-c", READS_UNTIL_MEMORY_ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "a draft failed in native code: out of memory\n", done.stderr
    library = drafts_library.drafts_library()
    with pytest.raises(EngineError, match="could not create a proposer"):
        made(library.drafts_new_prompt_lookup(PromptLookupOptions(max_ngram=-2)), "a proposer")


def test_a_model_without_memory_is_an_error(folder: Path) -> None:
    library = load()
    with pytest.raises(EngineError, match="could not create a model"):
        made(library.native_new(ctypes.byref(Shape(num_layers=-1)), 1), "a model")
    paged: Any = make_paged(folder, "float32", kernels="native")
    numbers = (ctypes.c_float * 4)()
    assert library.native_set_vector(paged.model._handle, 0, b"mlp_norm", numbers, -1) == b"a size is beyond all memory"
    assert library.native_set_vector(paged.model._handle, 0, b"other", numbers, 4) == b"there is no such vector"


def test_a_burst_whose_proposer_fails_is_an_error(folder: Path) -> None:
    """The engine's thread then stops the engine, as after any error within a pass."""
    engine = TargetEngine(make_paged(folder, "float32", kernels="native"))
    fails = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: -1)
    # A C++ object whose third virtual function, after two destructors, is `next`.
    virtual = (ctypes.c_void_p * 3)(None, None, ctypes.cast(fails, ctypes.c_void_p).value)
    proposer = ctypes.c_void_p(ctypes.addressof(virtual))
    call = Sequence(engine, 1).several(NativeDrafts(proposer, 4, 4, ("text",), ctypes.addressof(proposer)))
    with pytest.raises(EngineError, match="the forward pass failed in native code: a proposer has failed"):
        engine.advance([call])


@needs_compiler
def test_an_exception_on_any_thread_reaches_the_caller_of_the_job(tmp_path: Path) -> None:
    program = tmp_path / "pool"
    source = Path(__file__).with_name("pool.cpp")
    command = [str(COMPILER), *FLAGS, "-fsanitize=thread", f"-I{LIBRARY.folder}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=100)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
