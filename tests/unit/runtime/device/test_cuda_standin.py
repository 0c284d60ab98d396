"""The stand-in for a CUDA device refuses what CUDA refuses, and counts what makes the host wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.support.cuda_standin import cuda_standin
from tests.support.device_tensors import DeviceTensor, Traffic

Function = Callable[[torch.Tensor], object]


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    with cuda_standin() as found:
        yield found


def numbers() -> torch.Tensor:
    return torch.arange(6.0, device="cuda").view(2, 3)


def pinned() -> torch.Tensor:
    return torch.empty(3, pin_memory=True)


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x + torch.ones(2, 3), "at least two devices, cuda:0, cpu"),
        (lambda x: torch.cat([x, torch.ones(2, 3)]), "at least two devices, cuda:0, cpu"),
        (lambda x: x.gather(1, torch.zeros(2, 1, dtype=torch.long)), "at least two devices, cuda:0, cpu"),
        (lambda x: torch.ones(3)[x[0].long()], "indices should be either on cpu or on the same device"),
        (lambda x: x.numpy(), "can't convert cuda:0 device type tensor to numpy"),
        (np.asarray, "can't convert cuda:0 device type tensor to numpy"),
        (lambda x: x.long() @ x.long().T, "no kernel for CUDA"),
        (lambda x: x.to("cuda:1"), "between two devices"),
        (lambda x: x.to("cpu", non_blocking=True), "nothing waits for"),
        (lambda x: torch.cuda.synchronize("cuda:1"), "invalid device ordinal"),
    ],
)
def test_what_cuda_refuses_is_refused(traffic: Traffic, is_inference: bool, function: Function, words: str) -> None:
    with torch.inference_mode(is_inference), pytest.raises((RuntimeError, TypeError, AssertionError), match=words):
        function(numbers())


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (lambda x: x[0, 0].item(), 1),
        (lambda x: float(x[0, 0]), 1),
        (lambda x: bool((x > 1).all()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x[[0, 1]], 1),
        (lambda x: x[torch.tensor([0, 1])], 1),
        (lambda x: x.__setitem__([0], 0.5), 2),  # the list and the number
        (lambda x: torch.tensor([1, 2], device="cuda"), 1),
        (lambda x: x.new_tensor([1.0]), 1),
        (lambda x: torch.ones(3).to("cuda", non_blocking=True), 1),
        (lambda x: pinned().to("cuda"), 1),
        (lambda x: pinned().to("cuda", torch.float64, non_blocking=True), 1),
        (lambda x: torch.cuda.synchronize(), 1),
        (lambda x: pinned().to("cuda", non_blocking=True), 0),
        (lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True), 0),
        (lambda x: (x * 2.0 + torch.tensor(1.0)).softmax(-1) @ x.T, 0),
        (lambda x: x[torch.tensor([0], device="cuda")], 1),  # of which the wait is for the new index
        (lambda x: x.masked_fill(x > 1, 0.0).sort(dim=-1), 0),
        (lambda x: x.__setitem__((0, slice(1, 2)), 0.5), 0),
        (lambda x: torch.zeros(3, device="cuda").copy_(x[0].double()), 0),
    ],
)
def test_waits_of_the_host_are_counted(traffic: Traffic, is_inference: bool, function: Function, waits: int) -> None:
    with torch.inference_mode(is_inference):
        x = numbers()
        with traffic.counted():
            function(x)
    assert len(traffic.waits) == waits, traffic.waits


def test_results_are_those_of_the_cpu_and_stay_on_the_device(traffic: Traffic) -> None:
    x = numbers()
    view = x[:, 1:]
    view += 1.0
    result = torch.nn.functional.linear(x, x).double()
    assert isinstance(result, DeviceTensor) and result.device == torch.device("cuda", 0) and result.is_cuda
    assert x.tolist() == [[0.0, 2.0, 3.0], [3.0, 5.0, 6.0]]
    assert result.tolist() == (x.cpu() @ x.cpu().T).tolist()


def test_memory_that_nothing_was_written_to_holds_nan(traffic: Traffic) -> None:
    assert torch.empty(3, device="cuda").isnan().all().item()


def test_pinned_memory_that_changes_before_its_copy_is_done_is_an_error(traffic: Traffic) -> None:
    memory = pinned().fill_(1.0)
    on_device = memory.to("cuda", non_blocking=True)
    memory.fill_(2.0)
    with pytest.raises(RuntimeError, match="pinned memory was written to"):
        on_device.tolist()


def test_an_event_has_no_time_before_the_device_has_reached_it(traffic: Traffic) -> None:
    stream = torch.cuda.current_stream()
    first, second = (stream.record_event(torch.cuda.Event(enable_timing=True)) for _ in range(2))
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) >= 0.0


def test_threads_use_the_device_too_and_afterwards_there_is_none() -> None:
    found: list[object] = []
    with cuda_standin():
        x = numbers()
        thread = threading.Thread(target=lambda: found.append(x.sum().item()))
        thread.start()
        thread.join(10.0)
    assert found == [15.0]
    assert not torch.cuda.is_available()
    with pytest.raises(RuntimeError, match="without the stand-in"):
        x.sum()
