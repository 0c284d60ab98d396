"""Tensors of a stand-in for a CUDA device, on a CPU: they show tensors on the wrong device, and where the host waits.

A device tensor reports a CUDA device to Python and to torch's C++ code, and holds a CPU tensor, on which its operations
run. So kernels, their rounding and their speed are the CPU's. Each rule names its source, by the path in torch's source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

#: They run as one although some are composite, with the bits of the CPU's own kernels. There are none of integers:
#: "addmm_cuda" not implemented for 'Long' (aten/src/ATen/native/cuda/Blas.cpp).
PRODUCTS = {f"aten::{name}" for name in ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention")}
#: They read a tensor without dimensions as a number, and wait for it if it is on the device (masked_fill__cuda in
#: aten/src/ATen/native/cuda/Indexing.cu, index_fill_ in native/TensorAdvancedIndexing.cpp: value.item()).
READS_NUMBER = {"aten::masked_fill", "aten::masked_fill_", "aten::index_fill", "aten::index_fill_"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
#: Of operations with such a tag the host needs numbers: to return them, or for the shape of the result
#: (aten/src/ATen/native/tags.yaml; torch.cuda.set_sync_debug_mode warns of them).
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
PROJECT = Path(__file__).parents[2]


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


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on the CPU tensors inside, by the rules of CUDA."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) and name not in PRODUCTS:
            with self:
                return func.decompose(*args, **kwargs)
        if name == "aten::_to_copy":
            return self._to_copy(func, args[0], kwargs)
        if name == "aten::copy_":
            return self._copy(func, *args, **kwargs)
        if name == "aten::is_pinned":
            return args[0].untyped_storage()._cdata in self._traffic.pinned
        if name == "aten::_pin_memory":
            return self._traffic.pin(args[0].clone())
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        device = _common_device(func, name, args, tensors, kwargs.get("device"))
        if device is not None:
            self._count(func, name, args, device)
            return _run(func, args, kwargs, device)
        is_pinned = bool(kwargs.pop("pin_memory", False))
        args, kwargs = _inside((args, kwargs))  # empty_like and others take a device tensor with the host as device
        result = func(*args, **kwargs)
        return self._traffic.pin(result) if is_pinned else result

    def _to_copy(self, func: Any, source: Tensor, options: dict[str, Any]) -> Tensor:
        target = torch.device(options.pop("device", None) or source.device)
        non_blocking = options.pop("non_blocking", False)
        if target == source.device:
            copied: Tensor = func(source, **options) if target.type == "cpu" else _run(func, (source,), options, target)
            return copied
        if isinstance(source, DeviceTensor):
            if target.type == "cuda":
                raise NotImplementedError("a copy between two devices")
            return func(self._traffic.to_host(source, non_blocking), **options)  # type: ignore[no-any-return]
        return self._traffic.to_device(source, target, options.get("dtype") or source.dtype, non_blocking)

    def _copy(self, func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy into a tensor. One number on the host is an argument of a kernel (native/Copy.cpp: fill_)."""
        if isinstance(source, DeviceTensor) and not isinstance(target, DeviceTensor):
            source = self._traffic.to_host(source, non_blocking)
        elif isinstance(target, DeviceTensor) and not isinstance(source, DeviceTensor) and source.dim():
            source = self._traffic.to_device(source, target.device, target.dtype, non_blocking)
        if isinstance(target, DeviceTensor):
            return _run(func, (target, source), {}, target.device)  # type: ignore[no-any-return]
        return func(target, source)  # type: ignore[no-any-return]

    def _count(self, func: Any, name: str, args: Any, device: torch.device) -> None:
        """Note the waits of an operation on the device.

        Source for indices: aten/src/ATen/native/IndexingUtils.h (expandTensors: nonzero makes indices of a mask),
        native/TensorAdvancedIndexing.cpp (make_info moves indices to the device, _index_put_impl_ a number; one number
        for one mask is a masked_fill).
        """
        if name in INDEXING:
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            is_fill = name != "aten::index" and len(masks) == len(args[1]) == 1 and args[2].numel() == 1
            for index in args[1]:
                if index is not None and not isinstance(index, DeviceTensor):
                    self._traffic.to_device(index, device, index.dtype, non_blocking=False)
            if masks and not is_fill:
                self._traffic.wait("index by a mask")
            if name != "aten::index" and not is_fill and not isinstance(args[2], DeviceTensor):
                self._traffic.to_device(args[2], device, args[2].dtype, non_blocking=False)
        elif WAITING.intersection(func.tags) or (name in READS_NUMBER and isinstance(args[-1], DeviceTensor)):
            self._traffic.wait(name)


def _common_device(
    func: Any, name: str, args: Any, tensors: Sequence[Tensor], named: torch.device | None
) -> torch.device | None:
    """Return the device that an operation runs on, None for the CPU; raise CUDA's error if its tensors are on several.

    One number on the host is an argument of a pointwise kernel (aten/src/ATen/TensorIterator.cpp, compute_types:
    allow_cpu_scalars); other kernels check all tensors (c10/core/impl/DeviceGuardImplInterface.h by the generated code,
    check_and_update_common_device). Indices may be on the host, see `Operations._count`, but not only they on a device.
    """
    free: list[Tensor] = [each for each in args[1] if each is not None] if name in INDEXING else []
    takes_number = torch.Tag.pointwise in func.tags or name in {*READS_NUMBER, *INDEXING, "aten::fill_"}
    bound = [each for each in tensors if not any(each is other for other in free)]
    devices = {each.device for each in bound if each.is_cuda or each.dim() or not takes_number}
    if len(devices) > 1 and any(each.type == "cuda" for each in devices):
        found = ", ".join(sorted(map(str, devices), reverse=True))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {found}!")
    if free and any(each.is_cuda and {each.device} != devices for each in free):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    found_device = torch.device(named) if named is not None else next(iter(devices), torch.device("cpu"))
    if found_device.type != "cuda":
        return None
    if func.namespace != "aten" or (name in PRODUCTS and not all(each.is_floating_point() for each in tensors[:2])):
        raise NotImplementedError(f"{func} has no kernel for CUDA and {[each.dtype for each in tensors]}")
    return found_device


def _run(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    """Run an operation on the CPU tensors inside; what it returns of its arguments stays the same tensor."""
    wrappers = {id(each.inner): each for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor)}
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = _inside((args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if "empty" in func._schema.name:
        _spoil(result)
    if any(each.shape != each.inner.shape for each in wrappers.values()):
        raise NotImplementedError(f"{func} changes the shape of a tensor in place")

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return wrappers[id(value)] if id(value) in wrappers else DeviceTensor(value, device)

    return tree_map(wrapped, result)


def _inside(values: Any) -> Any:
    """Return arguments with the CPU tensors inside the device tensors."""
    return tree_map(lambda each: each.inner if isinstance(each, DeviceTensor) else each, values)


def _spoil(tensor: Tensor) -> None:
    """Fill memory that nothing has been written to, as torch.utils.deterministic.fill_uninitialized_memory does."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _place() -> str:
    """Return the innermost line of the project's code, tests/support aside."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PROJECT) and "site-packages" not in path.parts and path.parent.name != "support":
            return f"{path.relative_to(PROJECT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the project"
