"""The CUDA kernels on a GPU, where there is one."""

from __future__ import annotations

import pytest
import torch

from rwkv_clip.wkv import cuda, wkv6_bidirectional

from .cases import DECAYS, RESULTS, largest_error, output_and_gradients, random_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("N", [8, 64, 80, 128])
def test_agrees_with_the_reference(N, dtype):
    """Output and gradients of every length and kind of decay are the recurrence's, as near as the dtype can hold them."""
    for T in (1, 2, 3, 31, 49, 77, 196, 256, 1025):
        for decay in DECAYS:
            inputs = [x.cuda() for x in random_inputs(2, T, 3, N, decay, T, dtype)]
            expected = output_and_gradients([x.double() for x in inputs], "reference")
            for name, seen, value in zip(RESULTS, output_and_gradients(inputs, "cuda"), expected, strict=True):
                assert largest_error(seen, value) < max(1e-5, torch.finfo(dtype).eps), (name, T, decay)


def test_auto_takes_it():
    """On CUDA tensors auto is the CUDA engine, bit for bit, and twice the same."""
    inputs = [x.cuda() for x in random_inputs(64, 77, 10, 64, "mid", 0, torch.float32)]
    assert cuda.misfit(*inputs[:5]) is None
    named = output_and_gradients(inputs, "cuda")
    for _ in range(2):
        for seen, expected in zip(output_and_gradients(inputs, "auto"), named, strict=True):
            assert torch.equal(seen, expected)


def test_waits_for_the_current_stream_only():
    """Launched on a stream of one's own, it reads what that stream wrote before and is read by it after."""
    *inputs, _ = (x.cuda() for x in random_inputs(8, 77, 10, 64, "mid", 0, torch.float32))
    expected = wkv6_bidirectional(*inputs, engine="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = [x.clone() for x in inputs]
        seen = wkv6_bidirectional(*late, engine="cuda").clone()
    stream.synchronize()
    assert torch.equal(seen, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_runs_on_the_tensors_device():
    """On the second GPU, while the first is current, it gives the same and leaves the current device as it was."""
    *inputs, _ = random_inputs(2, 77, 2, 64, "mid", 0, torch.float32)
    expected = wkv6_bidirectional(*(x.to("cuda:0") for x in inputs), engine="cuda")
    seen = wkv6_bidirectional(*(x.to("cuda:1") for x in inputs), engine="cuda")
    assert seen.device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.equal(seen.cpu(), expected.cpu())
