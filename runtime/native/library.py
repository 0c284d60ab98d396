"""The compiled forward pass: builds the shared library with the compiler at hand and calls it through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_void_p
from functools import cache
from pathlib import Path

from orchestrator.core.errors import first_line

FOLDER = Path(__file__).resolve().parent
SOURCES = ("model.cpp", "library.cpp")
HEADERS = ("kernels.h", "pool.h", "product.h", "model.h")
#: Without contraction a product and a sum are fused only where the code says so: all builds round alike.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
COMPILE_LIMIT_S = 300


class Unbuilt(Exception):
    """The library cannot be built or loaded here; the message says why."""


class Shape(Structure):
    """The sizes and constants of a decoder, as `native::Shape`."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "vocab_size",
        )),
        ("norm_eps", c_float),
        ("score_scale", c_float),
    ]  # fmt: skip


class PassArrays(Structure):
    """One pass, as `native::Pass`; the arrays must outlive the call."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_rows", "num_logits", "num_context_slots", "num_extra_slots", "num_slots", "feature_width",
            "num_threads",
        )),
        *((name, c_void_p) for name in (
            "ids", "slots", "context_starts", "context_lens", "context_slots", "extra_starts", "extra_slots",
            "logit_rows", "cosines", "sines", "cache", "features", "logits", "inputs", "attention_inputs",
        )),
    ]  # fmt: skip


def compiler() -> list[str]:
    """Return the command of a C++ compiler: CXX, g++, clang++, or the one of the package ziglang."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return [found]
    probe = subprocess.run([sys.executable, "-c", "import ziglang"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise Unbuilt("no C++ compiler: install g++, or the Python package ziglang")


def library_file() -> Path:
    """Return where the library of these sources belongs; other sources, flags or processors have another name."""
    digest = hashlib.sha256(" ".join((*FLAGS, _processor())).encode())
    for name in (*HEADERS, *SOURCES):
        digest.update((FOLDER / name).read_bytes())
    return FOLDER / "built" / f"libnative-{digest.hexdigest()[:16]}.so"


def _processor() -> str:
    """Return the processor and its instruction sets, for which -march=native compiles."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def build() -> Path:
    """Compile the library unless that has been done; raises Unbuilt with the compiler's first line."""
    file = library_file()
    if file.exists():
        return file
    partial = file.with_suffix(f".{os.getpid()}.part")
    command = [*compiler(), *FLAGS, *(str(FOLDER / name) for name in SOURCES), "-o", str(partial)]
    try:
        file.parent.mkdir(exist_ok=True)
        subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=True)
        partial.replace(file)
    except subprocess.CalledProcessError as error:
        raise Unbuilt(f"{command[0]} failed: {first_line(error.stderr)}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unbuilt(f"the native library cannot be built: {first_line(error)}") from None
    return file


@cache
def load() -> ctypes.CDLL:
    """Return the library with its argument types; raises Unbuilt when it cannot be built or loaded."""
    try:
        library = ctypes.CDLL(str(build()))
    except OSError as error:
        raise Unbuilt(f"the native library cannot be loaded: {error}") from None
    library.native_new.argtypes = [POINTER(Shape), c_int]
    library.native_new.restype = c_void_p
    library.native_delete.argtypes = [c_void_p]
    library.native_set_linear.argtypes = [c_void_p, c_int, c_char_p, c_void_p, c_int, c_int]
    library.native_set_vector.argtypes = [c_void_p, c_int, c_char_p, c_void_p, c_int]
    library.native_set_layer.argtypes = [c_void_p, c_int, c_int, c_int]
    library.native_forward.argtypes = [c_void_p, POINTER(PassArrays)]
    library.native_forward.restype = c_char_p
    return library
