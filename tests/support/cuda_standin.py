"""A stand-in for a machine with CUDA devices, in a process without one: `with cuda_standin() as traffic: …`."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.cuda_operations import Operations
from tests.support.device_tensors import DeviceTensor, Traffic

#: Places of device types in torch's table of device guards (c10/core/DeviceType.h).
CUDA, META, NUM_DEVICE_TYPES = 1, 14, 21
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry


class _Functions(TorchFunctionMode):
    """What torch does in C++ below the operations: lists as indices, tensors from numbers, and reading numbers."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.device:
            args, kwargs = _numbered(args), {key: _numbered(value) for key, value in kwargs.items()}
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            return self._new(func, args, kwargs)
        if args and isinstance(own := args[0], DeviceTensor):
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                args = (own, self._index(args[1], own.device), *args[2:])
            elif func is Tensor.tolist:  # torch/csrc/utils/tensor_list.cpp copies the tensor to the host
                return self._traffic.to_host(own, non_blocking=False).tolist()
            elif func in (Tensor.numpy, Tensor.__array__):  # torch/csrc/utils/tensor_numpy.cpp
                raise TypeError(
                    f"can't convert {own.device} device type tensor to numpy. "
                    "Use Tensor.cpu() to copy the tensor to host memory first."
                )
            elif func is Tensor.quantile:  # it changes shapes in place, which is not modelled
                return DeviceTensor(func(own.inner, *args[1:], **kwargs), own.device)
            elif func is Tensor.data_ptr:
                raise NotImplementedError("the address of a device tensor")
        return func(*args, **kwargs)

    def _new(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a tensor on the host, and copy it (torch/csrc/utils/tensor_new.cpp, internal_new_from_data)."""
        own = args[0].device if func is Tensor.new_tensor else torch.device("cpu")
        device = torch.device(kwargs.pop("device", None) or own)
        if func is Tensor.new_tensor:
            kwargs.setdefault("dtype", args[0].dtype)
            func, args = torch.tensor, args[1:]
        return func(*args, **kwargs).to(device)

    def _index(self, index: Any, device: torch.device) -> Any:
        """Copy the lists of an index (torch/csrc/autograd/python_variable_indexing.cpp, sequenceToVariable)."""
        if isinstance(index, tuple):
            return tuple(self._index(each, device) for each in index)
        return torch.tensor(index).to(device) if isinstance(index, list) else index


def _numbered(value: Any) -> Any:
    """Return the device `cuda` with the number of the current one, 0, as c10's guards do (ensure_has_index)."""
    if isinstance(value, tuple):
        return tuple(map(_numbered, value))
    if value == "cuda" or (isinstance(value, torch.device) and value.type == "cuda" and value.index is None):
        return torch.device("cuda", 0)
    return value


class _Stream:
    """torch.cuda.Stream: it runs in order, and an event is a point in it."""

    def __init__(self, traffic: Traffic, device: torch.device) -> None:
        self._traffic, self.device = traffic, device

    def record_event(self, event: _Event) -> _Event:
        event.record(self)
        return event


class _Event:
    """torch.cuda.Event; its time is the host's.

    elapsed_time raises, as CUDA does, if an event is not recorded or not done (cudaEventElapsedTime: cudaErrorNotReady),
    or if the events are of different devices.
    """

    def __init__(self, traffic: Traffic, enable_timing: bool = False) -> None:
        self._traffic, self._has_time = traffic, enable_timing
        self._at_s, self._num_waits, self._stream = -1.0, -1, _Stream(traffic, torch.device("cuda", 0))

    def record(self, stream: _Stream | None = None) -> None:
        self._stream = stream or self._stream
        self._at_s, self._num_waits = time.monotonic(), self._traffic.num_waits

    def query(self) -> bool:
        return self._traffic.num_waits > self._num_waits

    def synchronize(self) -> None:
        if not self.query():
            self._traffic.wait("event")

    def elapsed_time(self, end: _Event) -> float:
        events = (self, end)
        if not all(each._has_time and each._at_s >= 0.0 and each.query() for each in events):
            raise RuntimeError("CUDA error: device not ready")
        if self._stream.device != end._stream.device:
            raise RuntimeError("CUDA error: invalid resource handle")
        return 1e3 * (end._at_s - self._at_s)


@contextmanager
def cuda_standin(num_devices: int = 1) -> Iterator[Traffic]:
    """Let torch see CUDA devices, on this thread and those that start inside; yield what passes to and from them.

    What torch.cuda has beside the functions below raises as in torch without CUDA.
    """
    traffic = Traffic()

    def device_of(device: Any = None) -> torch.device:
        found: torch.device = _numbered(torch.device("cuda") if device is None else torch.device(device))
        if found.type != "cuda" or (found.index or 0) >= num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
        return found

    def synchronize(device: Any = None) -> None:
        device_of(device)
        traffic.wait("synchronize")

    run = threading.Thread.run

    def run_with_standin(thread: threading.Thread) -> None:
        with _modes(traffic):
            run(thread)

    replaced: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "synchronize": synchronize,
        "current_stream": lambda device=None: _Stream(traffic, device_of(device)),
        "Event": lambda **options: _Event(traffic, **options),
        "_lazy_init": lambda: None,
    }
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    # nn.Module.to would otherwise put a device tensor's C++ half alone into a parameter on the host.
    overwrote = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_standin))
        stack.enter_context(_device_guard())
        stack.enter_context(_modes(traffic))
        stack.callback(torch.backends.cuda.enable_cudnn_sdp, had_cudnn)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrote)
        yield traffic


@contextmanager
def _modes(traffic: Traffic) -> Iterator[None]:
    """Torch keeps modes by thread."""
    with _Functions(traffic), Operations(traffic):
        yield


@contextmanager
def _device_guard() -> Iterator[None]:
    """Let C++ code change to a CUDA device: torch without CUDA has no guard for one, and that of `meta` does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * NUM_DEVICE_TYPES).in_dll(library, GUARDS)
    before = guards[CUDA]
    guards[CUDA] = guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before
