"""Tensors of a stand-in for a CUDA device, on a CPU: they show tensors on the wrong device, and where the host waits.

A device tensor reports a CUDA device to Python and to torch's C++ code, and holds a CPU tensor, on which its operations
run. So kernels, their rounding and their speed are the CPU's. Each rule names its source, by the path in torch's source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SUPPORT = f"{Path(__file__).parent}/"
PROJECT = f"{Path(__file__).parents[2]}/"


class Wait(NamedTuple):
    """The host waits for the device. place: the line of the project's code that makes it wait."""

    operation: str
    place: str


class DeviceTensor(Tensor):
    """A tensor on the stand-in's device. inner: the CPU tensor that holds its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> DeviceTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        with torch.inference_mode(False):  # views of tensors from outside the mode must not be of inside
            made: DeviceTensor = Tensor._make_wrapper_subclass(cls, inner.shape, device=device, **layout)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} reads a device tensor on a thread, or at a time, without the stand-in")

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: DeviceTensor) -> None:
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.inner = new.inner


@dataclass(eq=False)
class Traffic:
    """What passes between host and device. waits: of the host for the device. copies: to the device.

    pinned: the tensors in pinned memory by their storage; they are kept, so that no other memory gets its address.
    pending: pinned memory whose copy may not be done yet, with its content.
    """

    waits: list[Wait] = field(default_factory=list)
    copies: int = 0
    num_waits: int = 0
    pinned: dict[int, Tensor] = field(default_factory=dict)
    _pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @contextmanager
    def counted(self) -> Iterator[Traffic]:
        """Begin to count anew."""
        self.waits.clear()
        self.copies = 0
        yield self

    def wait(self, operation: str) -> None:
        """Note that the host waits; then all earlier work of the device is done."""
        self.num_waits += 1
        self.waits.append(Wait(operation, _place()))
        for memory, content in self._pending:
            if not torch.equal(memory, content):
                raise RuntimeError("pinned memory was written to before its copy to the device was done")
        self._pending.clear()

    def to_device(self, source: Tensor, device: torch.device, dtype: torch.dtype, non_blocking: bool) -> Tensor:
        """Copy a host tensor to the device, as another dtype if it has another.

        The host does not wait if it need not and the memory is pinned. Another dtype or layout is made on the host
        first, in memory that is not pinned. Source: aten/src/ATen/native/cuda/Copy.cu (copy_requires_temporaries,
        memcpy_and_sync); CUDA Runtime API, API synchronization behavior (pageable memory).
        """
        if source.numel():
            self.copies += 1
            is_direct = source.dtype == dtype and source.is_contiguous()
            if non_blocking and is_direct and source.untyped_storage()._cdata in self.pinned:
                self._pending.append((source, source.clone()))
            else:
                self.wait("copy to the device")
        return DeviceTensor(source.to(dtype, copy=True), device)

    def to_host(self, source: DeviceTensor, non_blocking: bool) -> Tensor:
        """Return a device tensor's numbers on the host, which waits for them (Copy.cu, memcpy_and_sync)."""
        if non_blocking:
            raise NotImplementedError("a copy to the host that nothing waits for: its result would not be valid yet")
        if source.numel():
            self.wait("copy to the host")
        return source.inner.clone()

    def pin(self, tensor: Tensor) -> Tensor:
        """Count a host tensor as pinned, and return it."""
        self.pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor


def _place() -> str:
    """Return the innermost line of the project's code, tests/support aside."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file.startswith(PROJECT) and not file.startswith(SUPPORT) and "site-packages" not in file:
            return f"{file.removeprefix(PROJECT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the project"
