"""The operations on tensors of the stand-in for a CUDA device: on which device they run, and where the host waits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.device_tensors import DeviceTensor, Traffic

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


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on the CPU tensors inside, by the rules of CUDA."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name
        if _is_composite(func) and name not in PRODUCTS:
            with self:
                return func.decompose(*args, **kwargs)
        if name == "aten::_to_copy":
            return self._to_copy(func, args[0], kwargs)
        if name == "aten::copy_":
            return self._copy(func, *args, **kwargs)
        if name in ("aten::is_pinned", "aten::_pin_memory"):
            is_pinned = args[0].untyped_storage()._cdata in self._traffic.pinned
            return is_pinned if name == "aten::is_pinned" else self._traffic.pin(args[0].clone())
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


@cache
def _is_composite(func: Any) -> bool:
    found: bool = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return found


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
