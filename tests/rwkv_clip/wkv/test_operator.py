"""The WKV operator: its engines against the original's numbers, against each other, and as a torch operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_clip.wkv import wkv6_bidirectional
from rwkv_clip.wkv.chunked import chunk_length

from .cases import CASES, DECAYS, NAMES, RESULTS, largest_error, output_and_gradients, random_inputs, recorded_case

ENGINES = ["reference", "chunked"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_original(numbers, case, engine):
    """Output and all five gradients equal the original's to float64 rounding, for every recorded case."""
    inputs, expected = recorded_case(numbers("wkv_cases.npz"), case, torch.float64)
    for name, seen, value in zip(RESULTS, output_and_gradients(inputs, engine), expected, strict=True):
        assert largest_error(seen, value) < 1e-13, name


@given(
    B=st.integers(1, 3), T=st.integers(1, 81), H=st.integers(1, 3), N=st.sampled_from([4, 8, 64, 80]),
    decay=st.sampled_from(sorted(DECAYS)), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_chunked_equals_reference(B, T, H, N, decay, seed):
    """The chunked engine equals the recurrence in output and gradients for every shape and kind of decay."""
    inputs = random_inputs(B, T, H, N, decay, seed)
    for seen, expected in zip(
        output_and_gradients(inputs, "chunked"), output_and_gradients(inputs, "reference"), strict=True
    ):
        assert largest_error(seen, expected) < 1e-12


@given(T=st.integers(1, 30), decay=st.sampled_from(sorted(DECAYS)), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_single_precision_stays_near_the_reference(T, decay, seed):
    """In float32 the chunked engine stays within 1e-5 of the float64 recurrence, gradients of the decay included."""
    inputs = random_inputs(1, T, 2, 16, decay, seed, torch.float32)
    expected = output_and_gradients([x.double() for x in inputs], "reference")
    for seen, value in zip(output_and_gradients(inputs, "chunked"), expected, strict=True):
        assert seen.dtype == torch.float32
        assert largest_error(seen, value) < 1e-5


@pytest.mark.parametrize("saturated", [5.0, 12.0, 20.0, 40.0, 88.0, 89.0, 300.0])
def test_decay_gradient_beside_saturated_channels(saturated):
    """Where decays underflow to zero their gradient is zero, and their neighbours' is right to 1e-5, in float32."""
    inputs = random_inputs(1, 77, 1, 64, "mid", 0, torch.float32)
    inputs[3][..., ::2] = saturated
    gw = output_and_gradients(inputs, "chunked")[4]
    expected = output_and_gradients([x.double() for x in inputs], "reference")[4]
    assert float(expected[..., 1::2].abs().max()) > 0.5
    assert largest_error(gw, expected) < 1e-5
    assert float(gw[..., ::2].abs().max()) < 1e-40 or saturated == 5.0


@pytest.mark.parametrize("engine", ENGINES)
def test_one_time_step_is_the_bonus_alone(engine):
    """With T = 1 there is nothing before or after: y = sum_j(r u k) v, and the decay gets no gradient."""
    inputs = random_inputs(2, 1, 2, 8, "mid", 1)
    r, k, v, _, u, _ = inputs
    y, *gradients = output_and_gradients(inputs, engine)
    assert largest_error(y, (r * u * k).sum(-1, keepdim=True) * v) < 1e-14
    assert not bool(gradients[3].any())


@pytest.mark.parametrize("engine", ENGINES)
def test_reversing_time_reverses_the_output(engine):
    """The operator treats both directions alike: reversed inputs give the reversed output."""
    *inputs, _ = random_inputs(2, 13, 2, 8, "mid", 2)
    reversed_inputs = [x.flip(1) if x.dim() == 4 else x for x in inputs]
    y = wkv6_bidirectional(*inputs, engine=engine)
    assert largest_error(wkv6_bidirectional(*reversed_inputs, engine=engine).flip(1), y) < 1e-13


@pytest.mark.parametrize("engine", ENGINES)
def test_gradcheck(engine):
    """Analytic gradients equal numerical ones, in every input."""
    *inputs, _ = random_inputs(1, 6, 2, 4, "mid", 3)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: wkv6_bidirectional(*x, engine=engine), leaves)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(engine, requires_grad):
    """torch's own checks of an operator pass: schema, fake implementation, autograd registration, AOT dispatch."""
    *inputs, gy = random_inputs(1, 5, 2, 4, "mid", 4)
    leaves = [x.requires_grad_(requires_grad) for x in inputs]
    torch.library.opcheck(torch.ops.rwkv_clip.wkv6, (*leaves, engine))
    plain = [x.detach() for x in inputs]
    torch.library.opcheck(torch.ops.rwkv_clip.wkv6_backward, (*plain, gy, engine))


def test_compiles_into_one_graph():
    """Under torch.compile(fullgraph=True) output and gradients are those of eager mode."""
    inputs = random_inputs(1, 6, 2, 8, "mid", 5)
    *tensors, gy = inputs
    leaves = [x.clone().requires_grad_() for x in tensors]
    y = torch.compile(wkv6_bidirectional, fullgraph=True, backend="aot_eager")(*leaves)
    seen = [y.detach(), *torch.autograd.grad(y, leaves, gy)]
    for value, expected in zip(seen, output_and_gradients(inputs, "chunked"), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision_inputs_are_computed_wider(engine, dtype):
    """Half inputs give outputs and gradients in their own dtype, as near as that dtype can hold them."""
    inputs = random_inputs(1, 9, 2, 8, "mid", 6, dtype)
    expected = output_and_gradients([x.double() for x in inputs], "reference")
    for seen, value in zip(output_and_gradients(inputs, engine), expected, strict=True):
        assert seen.dtype == dtype
        assert largest_error(seen, value) < torch.finfo(dtype).eps


def test_strided_inputs():
    """Inputs that are views with other strides, and a broadcast output gradient, give the same numbers."""
    inputs = random_inputs(2, 7, 2, 8, "mid", 7)
    strided = [x.mT.contiguous().mT for x in inputs]
    strided[-1] = torch.ones(()).double().expand_as(inputs[-1])
    inputs[-1] = torch.ones_like(inputs[-1])
    assert not strided[0].is_contiguous()
    for seen, value in zip(
        output_and_gradients(strided, "chunked"), output_and_gradients(inputs, "chunked"), strict=True
    ):
        assert torch.equal(seen, value)


def test_slabs_change_nothing(monkeypatch):
    """Cutting the work into slabs of one head gives the numbers of doing it all at once."""
    inputs = random_inputs(3, 70, 2, 8, "mid", 8)
    whole = output_and_gradients(inputs, "chunked")
    monkeypatch.setattr("rwkv_clip.wkv.chunked.SLAB_ELEMENTS", 1)
    for seen, value in zip(output_and_gradients(inputs, "chunked"), whole, strict=True):
        assert largest_error(seen, value) < 1e-13


@given(T=st.integers(1, 5000), N=st.integers(1, 32).map(lambda n: 4 * n))
def test_chunks_waste_little(T, N):
    """Chunks are at most 4 N long, cover all time steps, and stay empty for less than 4 steps each (and one)."""
    L = chunk_length(T, N)
    chunks = -(-T // L)
    assert 1 <= L <= 4 * N
    assert 0 <= chunks * L - T < 5 * chunks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 2, 3, 8)}, r"must share one shape .* k \(1, 2, 3, 8\)"),
        ({"u": (8, 2)}, r"u must have shape \(H, N\) = \(2, 8\); seen \(8, 2\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    """A shape that does not fit is an error that names it and what was expected."""
    shapes = dict.fromkeys("rkvw", (1, 3, 2, 8)) | {"u": (2, 8)} | change
    with pytest.raises(ValueError, match=message):
        wkv6_bidirectional(*(torch.zeros(shapes[name]) for name in NAMES))


@pytest.mark.parametrize("shape", [(1, 0, 2, 8), (1, 3, 2, 6), (1, 3, 2, 0)])
def test_no_time_or_odd_heads_are_refused(shape):
    """T = 0 and N that is no multiple of 4 are refused with the shape that was seen."""
    with pytest.raises(ValueError, match="N a positive multiple of 4; seen"):
        wkv6_bidirectional(*(torch.zeros(shape) for _ in range(4)), torch.zeros(shape[2:]))


def test_unknown_engine_is_named():
    """An unknown engine is an error that lists the known ones."""
    *inputs, _ = random_inputs(1, 2, 1, 4, "mid", 9)
    with pytest.raises(ValueError, match="unknown WKV engine 'fast': expected one of auto, reference, chunked, cuda"):
        wkv6_bidirectional(*inputs, engine="fast")
