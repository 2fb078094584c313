"""One optimiser step: against the original's, in micro-batches, in every precision, clipped and clamped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv_clip import ClipLoss
from rwkv_clip.training.optimizer import make_optimizer
from rwkv_clip.training.precision import make_scaler
from rwkv_clip.training.update import LARGEST_LOGIT_SCALE, Updater
from tests.rwkv_clip.originals import replay_trace

CPU = torch.device("cpu")


def updater(model, *, precision="fp32", clip_grad_norm=0.0, enter=lambda phase: None, init_scale=128.0, **options):
    """An updater with the original's optimiser."""
    settings = {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.2, "decay_all": True} | options
    scaler = make_scaler(precision, CPU, init_scale=init_scale, growth_interval=200)
    return Updater(model, make_optimizer(model, **settings), scaler, ClipLoss(), precision, clip_grad_norm, enter)


def test_nineteen_updates_are_the_originals(numbers):
    """Under the original's schedule, loss, gradient norm and scale of 19 steps and the last weights are its own."""
    recorded = numbers("trace_cosine.npz")
    for name, values in replay_trace().items():
        tolerance = 1e-11 if name == "param_l2_end" else 1e-12
        np.testing.assert_allclose(values, recorded[name], rtol=tolerance, atol=1e-13, err_msg=name)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_make_the_step_of_the_whole_batch(model_of, inputs_of, micro_batches):
    """In 2 and 4 micro-batches loss, every gradient and every updated weight are those of one batch, to rounding."""
    image, tokens = inputs_of("tiny")
    image = image.double()
    whole, parts = model_of("tiny").train(), model_of("tiny").train()
    expected = updater(whole)([(image, tokens)])
    seen = updater(parts)(list(zip(image.chunk(micro_batches), tokens.chunk(micro_batches), strict=True)))
    assert float(seen.loss) == pytest.approx(float(expected.loss), rel=1e-13)
    assert float(seen.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-11)
    theirs = gradients(whole)
    for name, gradient in gradients(parts).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-9, atol=1e-12, msg=name)
    for (name, weight), other in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-8, msg=name)


def test_a_loss_on_micro_batches_alone_would_differ(model_of, inputs_of):
    """The mean of the micro-batches' own losses is another number: the comparison above can fail."""
    image, tokens = inputs_of("tiny")
    model, loss = model_of("tiny").train(), 0.0
    with torch.no_grad():
        for part, text in zip(image.double().chunk(2), tokens.chunk(2), strict=True):
            features = [torch.nn.functional.normalize(x, dim=-1) for x in model(part, text)[:2]]
            loss += float(ClipLoss()(*features, model.logit_scale.exp())) / 2
    expected = float(updater(model)([(image.double(), tokens)]).loss)
    assert abs(loss - expected) > 0.1


def test_both_passes_of_a_micro_batch_drop_the_same(model_of, inputs_of):
    """With dropout and DropPath the second pass repeats the first one's random numbers: features agree bit for bit."""
    model = model_of("tiny", torch.float32, dropout=0.3, drop_path_rate=0.5).train()
    seen = []
    model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[0].detach().clone()))
    image, tokens = inputs_of("tiny")
    torch.manual_seed(0)
    updater(model)(list(zip(image.chunk(2), tokens.chunk(2), strict=True)))
    first, second, first_again, second_again = seen
    assert torch.equal(first, first_again)
    assert torch.equal(second, second_again)
    torch.manual_seed(0)
    with torch.no_grad():
        undropped = model.eval()(image[:2], tokens[:2])[0]
    assert not torch.equal(first, undropped)


class _Products(TorchDispatchMode):
    """Notes the dtypes of what enters matrix products, convolutions and the WKV operator."""

    OPS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution", "rwkv_clip::wkv6")

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name in self.OPS:
            dtypes = {arg.dtype for arg in args[:3] if isinstance(arg, torch.Tensor)}
            self.seen.setdefault(name, set()).update(dtypes)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_precision_is_what_the_ops_ran_in(model_of, inputs_of, precision, dtype):
    """Linear maps, convolution and WKV take the precision's dtype; features, loss and parameters are float32."""
    model, (image, tokens) = model_of("tiny", torch.float32).train(), inputs_of("tiny")
    with _Products() as products, torch.no_grad():
        update = updater(model, precision=precision)
        image_features, text_features, _ = update._features((image, tokens))
    assert products.seen["aten::convolution"] == {dtype}
    assert dtype in products.seen["rwkv_clip::wkv6"]
    linear = products.seen.get("aten::addmm", set()) | products.seen["aten::mm"]
    assert dtype in linear
    assert linear <= {dtype, torch.float32}
    if dtype == torch.float32:
        assert all(dtypes == {torch.float32} for dtypes in products.seen.values())
    assert image_features.dtype == text_features.dtype == torch.float32
    assert update([(image, tokens)]).loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())


def test_only_fp16_scales(model_of, inputs_of):
    """The scaler works for fp16 alone; the reported gradient norm is the unscaled one."""
    image, tokens = inputs_of("tiny")
    norms = {}
    for precision in ("fp32", "fp16"):
        update = updater(model_of("tiny", torch.float32).train(), precision=precision, init_scale=64.0)
        norms[precision] = float(update([(image, tokens)]).grad_norm)
        assert update.scaler.is_enabled() == (precision == "fp16")
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.05)


def test_a_step_with_infinities_is_skipped(model_of, inputs_of):
    """In fp16 gradients that overflow leave the weights as they are, halve the scale, and are reported as skipped."""
    model, (image, tokens) = model_of("tiny", torch.float32).train(), inputs_of("tiny")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    update = updater(model, precision="fp16", init_scale=2.0**60)
    assert update([(image, tokens)]).skipped
    assert update.scaler.get_scale() == 2.0**59
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sound = updater(model, precision="fp16", init_scale=1.0)
    assert not sound([(image, tokens)]).skipped


def test_the_logit_scale_is_clamped(model_of, inputs_of):
    """After an update the scale's logarithm is within [0, ln 100], whatever the update was."""
    model, (image, tokens) = model_of("tiny", torch.float32).train(), inputs_of("tiny")
    for start, end in ((9.0, LARGEST_LOGIT_SCALE), (-9.0, 0.0)):
        with torch.no_grad():
            model.logit_scale.fill_(start)
        updater(model)([(image, tokens)])
        assert model.logit_scale.item() == pytest.approx(end)


@pytest.mark.parametrize(("limit", "clipped"), [(0.01, True), (0.0, False)])
def test_gradients_are_clipped(model_of, inputs_of, limit, clipped):
    """The returned norm is the one before clipping; after it no gradient norm exceeds the limit, and 0 means none."""
    model, (image, tokens) = model_of("tiny", torch.float32).train(), inputs_of("tiny")
    grad_norm = float(updater(model, clip_grad_norm=limit)([(image, tokens)]).grad_norm)
    left = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert left == pytest.approx(0.01 if clipped else grad_norm, rel=1e-3)
    assert grad_norm > 0.01


def test_phases_come_in_order(model_of, inputs_of):
    """A step says what begins: forward, gather, backward, update; with micro-batches each pass says it."""
    image, tokens = inputs_of("tiny")
    phases = []
    update = updater(model_of("tiny", torch.float32), enter=phases.append)
    update([(image, tokens)])
    assert phases == ["forward", "gather", "backward", "update"]
    phases.clear()
    update(list(zip(image.chunk(2), tokens.chunk(2), strict=True)))
    assert phases == ["forward", "forward", "gather", *["forward", "backward"] * 2, "update"]
