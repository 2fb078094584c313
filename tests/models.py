"""Small models of every kind with a loop that trains each, and a photograph of everything that a run leaves behind.

A photograph holds bytes, so that two of them are equal only when the runs were equal bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import pickle
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.probed import Probed

See = Callable[[Any, Tensor], None]
"""A training step shows its outputs and its loss to this before it calls backward."""


@dataclass
class Subject:
    """A model, what it is fed and how it is trained."""

    model: nn.Module
    inputs: Callable[[], Any]
    """A fresh batch: a tuple of positional arguments or a dict of keyword arguments."""
    loss: Callable[[Any], Tensor]
    optimizers: Callable[[nn.Module], list[Optimizer]] = field(
        default_factory=lambda: lambda model: [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])]
    )
    step: Callable[[Subject, list[Optimizer], See], None] = field(default_factory=lambda: plain_step)
    scaler: torch.amp.GradScaler | None = None
    call: Callable[[nn.Module, Any], Any] = field(default_factory=lambda: apply)
    trains: bool = True
    watched: Callable[[nn.Module], nn.Module] = field(default_factory=lambda: lambda model: model)
    """What attach() is given: the model itself."""


def apply(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def plain_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """One batch, one backward, one step of every optimizer."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    output = subject.call(subject.model, subject.inputs())
    loss = subject.loss(output)
    see(output, loss)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def scaled_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """With a GradScaler; gradients are unscaled by it inside step()."""
    assert subject.scaler is not None
    for optimizer in optimizers:
        optimizer.zero_grad()
    output = subject.call(subject.model, subject.inputs())
    loss = subject.loss(output)
    see(output, loss)
    subject.scaler.scale(loss).backward()
    for optimizer in optimizers:
        subject.scaler.step(optimizer)
    subject.scaler.update()


def clipped_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """With a GradScaler that is told to unscale, and clipping in between."""
    assert subject.scaler is not None
    (optimizer,) = optimizers
    optimizer.zero_grad()
    output = subject.call(subject.model, subject.inputs())
    loss = subject.loss(output)
    see(output, loss)
    subject.scaler.scale(loss).backward()
    subject.scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(subject.model.parameters(), 0.1)
    subject.scaler.step(optimizer)
    subject.scaler.update()


def accumulating_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """Three micro-batches make one step."""
    for _ in range(3):
        output = subject.call(subject.model, subject.inputs())
        loss = subject.loss(output) / 3
        see(output, loss)
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def closure_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """The optimizer runs forward and backward itself, several times."""
    batch = subject.inputs()

    def closure() -> Tensor:
        optimizers[0].zero_grad()
        output = subject.call(subject.model, batch)
        loss = subject.loss(output)
        see(output, loss)
        loss.backward()
        return loss

    optimizers[0].step(closure)


def penalty_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """The gradient of the input is part of the loss: double backward."""
    optimizers[0].zero_grad()
    x = subject.inputs()[0].requires_grad_()
    output = subject.model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = subject.loss(output) + (slope.norm(dim=-1) - 1).square().mean()
    see((output, slope), loss)
    loss.backward()
    optimizers[0].step()


def twice_backward_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """Two backward passes through one graph."""
    optimizers[0].zero_grad()
    output = subject.model(*subject.inputs())
    loss = subject.loss(output)
    see(output, loss)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    optimizers[0].step()


def by_hand_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """No optimizer: parameters are moved along gradients that torch.autograd.grad returns."""
    output = subject.model(*subject.inputs())
    loss = subject.loss(output)
    see(output, loss)
    parameters = list(subject.model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.1 * gradient


def two_player_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """A generator and a discriminator, each with its optimizer, one after the other."""
    generator, discriminator = subject.model.generator, subject.model.discriminator
    real, noise = subject.inputs()
    optimizers[1].zero_grad()
    verdicts = discriminator(real), discriminator(generator(noise).detach())
    loss = nn.functional.softplus(-verdicts[0]).mean() + nn.functional.softplus(verdicts[1]).mean()
    see(verdicts, loss)
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    fake = generator(noise)
    loss = nn.functional.softplus(-discriminator(fake)).mean()
    see(fake, loss)
    loss.backward()
    optimizers[0].step()


def functional_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """The model is called with parameters from outside, and gradients come from torch.func.grad."""
    batch = subject.inputs()
    parameters = dict(subject.model.named_parameters())

    def loss_of(values: dict[str, Tensor]) -> tuple[Tensor, Any]:
        output = torch.func.functional_call(subject.model, values, batch)
        return subject.loss(output), output

    gradients, (loss, output) = torch.func.grad_and_value(loss_of, has_aux=True)(parameters)
    see(output, loss)
    optimizers[0].zero_grad()
    loss = subject.loss(torch.func.functional_call(subject.model, {k: v * 1 for k, v in parameters.items()}, batch))
    see(output, loss)
    loss.backward()
    for name, parameter in parameters.items():
        parameter.grad += gradients[name]
    optimizers[0].step()


def user_hooks_step(subject: Subject, optimizers: list[Optimizer], see: See) -> None:
    """The user has hooks of his own, which change outputs and gradients, and keeps the gradients of activations."""
    optimizers[0].zero_grad()
    kept: list[Any] = []
    model = subject.model

    def shrink(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output.retain_grad()
        kept.append(output)
        return output * 0.5

    handles = [
        model[0].register_forward_hook(shrink),
        model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        model[2].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 2,)),
        model[2].register_full_backward_pre_hook(lambda module, gout: (gout[0] * 3,)),
        model[2].weight.register_hook(lambda gradient: gradient + 1),
        model[2].weight.register_post_accumulate_grad_hook(halve_gradient),
    ]
    output = model(*subject.inputs())
    output.register_hook(lambda gradient: gradient * 7)
    loss = subject.loss(output)
    loss.backward()
    see((output, [tensor.grad for tensor in kept]), loss)
    optimizers[0].step()
    for handle in handles:
        handle.remove()


def halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


# ---- what models return, to losses


def squares(output: Any) -> Tensor:
    """Mean square of every floating tensor in an output, weighted by its place, so that no two gradients are equal."""
    parts = [
        (i + 1) * (tensor.abs().float() if tensor.is_complex() else tensor.float()).square().mean()
        for i, (_, tensor) in enumerate(tensors(output))
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.requires_grad
    ]
    return torch.stack(parts).sum()


def named_loss(output: Any) -> Tensor:
    """The loss that a model of transformers computes itself when it is given labels."""
    return output.loss


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in an output. Unlike the library's own walk it relies on nothing but types."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from tensors(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from tensors(item, f"{name}.{i}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors(getattr(value, item.name), f"{name}.{item.name}")


# ---- models


class Residual(nn.Module):
    """Changes what another module returned in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.outer = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h += self.outer(self.act(h.clone()))
        h.mul_(1.5)
        return self.drop(h)


class Views(nn.Module):
    """Modules that return views, one of which is changed in place."""

    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.chunk(3, dim=-1)

    class Slice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :4]

    def __init__(self) -> None:
        super().__init__()
        self.project, self.split, self.slice = nn.Linear(8, 24), self.Split(), self.Slice()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.project(x)
        q, k, v = self.split(h)
        part = self.slice(self.project(x))
        part.mul_(2).tanh_()
        return (q @ k.mT @ v).relu(), part, h.transpose(0, 1)


class Recurrent(nn.Module):
    """GRU and LSTM, over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.lstm = nn.LSTM(6, 5, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        h, _ = self.gru(packed)
        h, (last, _) = self.lstm(h)
        padded, _ = nn.utils.rnn.pad_packed_sequence(h, batch_first=True)
        return padded.sum((1, 2)) + last.sum((0, 2))


class Attention(nn.Module):
    """MultiheadAttention with a padding mask and a causal mask; its output projection is never called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor, padding: Tensor, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
        h, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=attn_mask)
        return self.norm(h + x), weights


class Tied(nn.Module):
    """A language model whose output weights are its embeddings, and one module that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.again = self.block
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for _ in range(3):
            h = torch.tanh(self.block(h))
        return self.head(self.again(h))


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor | None


@dataclass
class Answer:
    logits: Tensor
    hidden: list[Tensor]
    note: str = "fine"


class Structures(nn.Module):
    """Modules that return dicts, NamedTuples, dataclasses, nested lists, nothing, and things that hold no tensor."""

    class Returns(nn.Module):
        def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.linear, self.wrap = nn.Linear(8, 8), wrap

        def forward(self, x: Tensor) -> Any:
            return self.wrap(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.mapping = self.Returns(as_mapping)
        self.pair = self.Returns(as_pair)
        self.answer = self.Returns(as_answer)
        self.nested = self.Returns(as_nested)
        self.nothing = self.Returns(as_nothing)
        self.lazily = self.Returns(as_generator)

    def forward(self, x: Tensor) -> dict[str, Any]:
        a = self.mapping(x)
        b = self.pair(a["h"])
        c = self.answer(b.mean)
        d = self.nested(c.logits)
        self.nothing(x)
        (e,) = list(self.lazily(x))
        return {"mapping": a, "pair": b, "answer": c, "nested": d, "generated": e}


def as_mapping(h: Tensor) -> dict[Any, Any]:
    return {"h": h, 0: h.relu(), "none": None}


def as_pair(h: Tensor) -> Pair:
    return Pair(h * 2, None)


def as_answer(h: Tensor) -> Answer:
    return Answer(h.tanh(), [h, h.sigmoid()])


def as_nested(h: Tensor) -> list[Any]:
    return [[h, (h.exp(), [h.sin()])], {"deep": {"deeper": h.cos()}}, 3, "text"]


def as_nothing(h: Tensor) -> None:
    return None


def as_generator(h: Tensor) -> Iterator[Tensor]:
    return iter([h])


class Clamp(torch.autograd.Function):
    """Straight-through: rounds forward, passes the gradient on backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.scale), None


class Custom(nn.Module):
    """Calls a custom autograd.Function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Clamp.apply(self.a(x), 4.0))


class Checkpointed(nn.Module):
    """Blocks with dropout whose activations are computed again in backward."""

    def __init__(self, *, inplace: bool = True, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=inplace), nn.Dropout(0.2)) for _ in range(3)
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.ones((), requires_grad=True)
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return x


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Normed(nn.Module):
    """Parametrizations: weight norm, and spectral norm, whose buffers move with every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Conv1d(1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).unsqueeze(1))


class Bag(nn.Module):
    """Embeddings with sparse gradients, one of which renormalises its weights in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6, sparse=True)
        self.bag = nn.EmbeddingBag(20, 6, sparse=True, mode="sum", max_norm=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).sum(1) * self.bag(ids)


class Complex(nn.Module):
    """Complex parameters and outputs, conjugated lazily."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))
        self.conjugate = Conjugate()

    def forward(self, x: Tensor) -> Tensor:
        return self.conjugate(torch.fft.fft(x) @ self.weight)


class Conjugate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.conj()


class Augmented(nn.Module):
    """Draws from NumPy, from random and from torch inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.rrelu = nn.Linear(8, 8), nn.Dropout(0.5), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * float(np.random.rand()) + random.random() + torch.randn_like(x)
            x = torch.roll(x, random.randrange(4), dims=1)
        return self.rrelu(self.drop(self.a(x)))


class Codebook(nn.Module):
    """Vector quantisation: the codebook is a buffer that forward moves in place and at times replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 4)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("usage", torch.zeros(6, dtype=torch.complex64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        nearest = torch.cdist(h, self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, nearest, h.detach() * 0.1).mul_(0.99)
                self.usage = self.usage * 0.9 + torch.bincount(nearest, minlength=6) * 1j
                self.calls += 1
            self.last = nearest
        return h + (self.codes[nearest] - h).detach()


class Lazy(nn.Module):
    """Parameters that come into being, and a class that changes, in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Lazy modules are a new feature")
            self.a, self.norm, self.b = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


class Methods(nn.Module):
    """Never called itself: the loop calls methods of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 3), nn.Linear(3, 8)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).relu()

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)


class Players(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1))

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        return self.discriminator(self.generator(noise)) - self.discriminator(real)


class Ragged(nn.Module):
    """Nested tensors, of both layouts, between modules."""

    class Nest(nn.Module):
        def __init__(self, layout: torch.layout) -> None:
            super().__init__()
            self.layout = layout

        def forward(self, parts: list[Tensor]) -> Tensor:
            return torch.nested.as_nested_tensor(parts, layout=self.layout)

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)
        self.jagged, self.strided = self.Nest(torch.jagged), self.Nest(torch.strided)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[0, :2], x[1, :3], x[2, :1]]
        jagged, strided = self.a(self.jagged(parts)), self.a(self.strided(parts))
        return jagged.values() + torch.cat(list(strided.unbind()))


class LeafOutput(nn.Module):
    """A module that returns a parameter itself, as prompts and position embeddings are returned."""

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 8))

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.a = self.Prompt(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        prompt = self.prompt()
        return self.a(x + prompt), prompt


class Large(nn.Module):
    """A parameter so large that its update is told from a sample, and one without a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.empty = nn.Embedding(4000, 20), nn.Parameter(torch.empty(0, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.empty.sum()


def batch_of(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, ...]]:
    """A batch of one random tensor."""
    return lambda: (torch.randn(*shape, dtype=dtype),)


def ids_of(*shape: int, below: int) -> Callable[[], tuple[Tensor, ...]]:
    """A batch of random token ids."""
    return lambda: (torch.randint(0, below, shape),)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


def simple(make: Callable[[], nn.Module], inputs: Callable[[], Any], **how: Any) -> Callable[[], Subject]:
    """A builder of a model trained on `squares`."""
    return lambda: Subject(make(), inputs, squares, **how)


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, groups=2), nn.GroupNorm(2, 6), nn.SiLU(inplace=True), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(24, 4),
    )  # fmt: skip


def channels_last() -> Subject:
    return Subject(
        cnn().to(memory_format=torch.channels_last),
        lambda: (torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),),
        squares,
    )


def under_autocast(model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return apply(model, batch)


def with_saved_on_cpu(model: nn.Module, batch: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return apply(model, batch)


def by_methods(model: nn.Module, batch: Any) -> Any:
    z = model.encode(batch[0])
    return z, model.decode(z)


def scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def overflowing() -> torch.amp.GradScaler:
    """Its first scale overflows: the first step is skipped."""
    return scaler(3e38)


def fused_adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), fused=True)]


def lbfgs(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")]


def adam_of_each_player(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (model.generator, model.discriminator)]


def momentum(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)]


def sparse_adam(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SparseAdam(list(model.parameters()))]


def no_optimizer(model: nn.Module) -> list[Optimizer]:
    return []


def frozen() -> Subject:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.ReLU(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    return Subject(model, batch_of(5, 8), squares)


def translator() -> Subject:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    return Subject(
        model, lambda: {"src": torch.randn(2, 5, 8), "tgt": torch.randn(2, 4, 8), "tgt_mask": causal}, squares
    )


def encoder() -> Subject:
    """In eval mode with a padding mask torch fuses each layer and nests the batch, unless a hook is in the way."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return Subject(
        nn.TransformerEncoder(layer, 2),
        lambda: {"src": torch.randn(2, 5, 8), "src_key_padding_mask": padding},
        squares,
    )


def attention() -> Subject:
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return Subject(Attention(), lambda: (torch.randn(2, 5, 8), padding, causal), squares)


def encoder_layer() -> Subject:
    """The root itself is a module that torch fuses in eval mode."""
    return Subject(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), batch_of(2, 5, 8), squares)


def quantised() -> Subject:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(torch.ao.quantization|quantize_dynamic).*")
        warnings.filterwarnings("ignore", category=UserWarning)
        model = torch.ao.quantization.quantize_dynamic(mlp().eval(), {nn.Linear})
    return Subject(model, batch_of(4, 8), squares, trains=False)


def traced() -> Subject:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        inner = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(2, 8))
    return Subject(nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 2)), batch_of(3, 8), squares)


def scripted() -> Subject:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        inner = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    return Subject(nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 2)), batch_of(3, 8), squares)


def double() -> nn.Module:
    return mlp().double()


def bfloat16() -> nn.Module:
    return mlp().bfloat16()


def data_parallel() -> nn.Module:
    return nn.DataParallel(mlp())


def user_hooks_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


OWN: dict[str, Callable[[], Subject]] = {
    "mlp": simple(mlp, batch_of(4, 8)),
    "cnn": simple(cnn, batch_of(4, 3, 8, 8), optimizers=momentum),
    "channels_last": channels_last,
    "inplace_residual": simple(Residual, batch_of(4, 8)),
    "views": simple(Views, batch_of(4, 8)),
    "recurrent": simple(Recurrent, batch_of(3, 5, 4)),
    "transformer": translator,
    "encoder_fast_path": encoder,
    "encoder_layer_as_root": encoder_layer,
    "attention": attention,
    "tied_and_repeated": simple(Tied, ids_of(2, 6, below=11)),
    "structures": simple(Structures, batch_of(3, 8)),
    "custom_function": simple(Custom, batch_of(3, 8)),
    "checkpoint_reentrant": simple(partial(Checkpointed, use_reentrant=True), batch_of(3, 8)),
    "checkpoint_non_reentrant": simple(partial(Checkpointed, use_reentrant=False), batch_of(3, 8)),
    "checkpoint_selective": simple(
        partial(
            Checkpointed,
            inplace=False,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, keep_products),
        ),
        batch_of(3, 8),
    ),
    "parametrized": simple(Normed, batch_of(3, 8)),
    "sparse": simple(Bag, ids_of(4, 5, below=20), optimizers=sparse_adam),
    "complex": simple(Complex, batch_of(3, 8)),
    "bfloat16": simple(bfloat16, batch_of(4, 8, dtype=torch.bfloat16)),
    "float64": simple(double, batch_of(4, 8, dtype=torch.float64)),
    "autocast": simple(mlp, batch_of(4, 8), call=under_autocast),
    "scaler": lambda: Subject(mlp(), batch_of(4, 8), squares, step=scaled_step, scaler=scaler(), call=under_autocast),
    "scaler_clipped": lambda: Subject(mlp(), batch_of(4, 8), squares, step=clipped_step, scaler=scaler()),
    "scaler_skips": lambda: Subject(mlp(), batch_of(4, 8), squares, step=scaled_step, scaler=overflowing()),
    "scaler_fused": lambda: Subject(
        mlp(), batch_of(4, 8), squares, optimizers=fused_adamw, step=scaled_step, scaler=overflowing()
    ),
    "lbfgs": simple(mlp, batch_of(4, 8), optimizers=lbfgs, step=closure_step),
    "two_optimizers": simple(
        Players, lambda: (torch.randn(4, 8), torch.randn(4, 4)), optimizers=adam_of_each_player, step=two_player_step
    ),
    "frozen_backbone": frozen,
    "accumulation": simple(mlp, batch_of(4, 8), step=accumulating_step),
    "augmented": simple(Augmented, batch_of(4, 8)),
    "codebook": simple(Codebook, batch_of(5, 8)),
    "lazy": simple(Lazy, batch_of(5, 8)),
    "quantised": quantised,
    "functional_call": simple(mlp, batch_of(4, 8), step=functional_step),
    "traced_submodule": traced,
    "scripted_submodule": scripted,
    "gradient_penalty": simple(mlp, batch_of(4, 8), step=penalty_step),
    "backward_twice": simple(mlp, batch_of(4, 8), step=twice_backward_step),
    "by_hand": simple(mlp, batch_of(4, 8), optimizers=no_optimizer, step=by_hand_step),
    "user_hooks": simple(user_hooks_model, batch_of(4, 8), step=user_hooks_step),
    "saved_on_cpu": simple(mlp, batch_of(4, 8), call=with_saved_on_cpu),
    "methods_only": simple(Methods, batch_of(4, 8), call=by_methods),
    "nested_tensors": simple(Ragged, batch_of(3, 4, 8)),
    "leaf_output": simple(LeafOutput, batch_of(3, 8)),
    "large_and_empty": simple(Large, ids_of(2, 6, below=4000)),
    "data_parallel": simple(data_parallel, batch_of(4, 8)),
    "probes": simple(Probed, ids_of(2, 6, below=8)),
    "probes_reentrant": simple(partial(Probed, True), ids_of(2, 6, below=8)),
    "probes_checkpointed": simple(partial(Probed, False), ids_of(2, 6, below=8)),
    "probes_autocast": simple(Probed, ids_of(2, 6, below=8), call=under_autocast),
}
"""One model of our own of every kind that has given hooks trouble."""


# ---- families of transformers, from tiny configurations

TEXT = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def words(length: int = 7, *, labels: bool = True, mask: bool = True) -> Callable[[], dict[str, Tensor]]:
    """Two texts, one of them padded."""

    def make() -> dict[str, Tensor]:
        ids = torch.randint(3, 48, (2, length))
        batch = {"input_ids": ids}
        if mask:
            batch["attention_mask"] = torch.tensor([[1] * length, [1] * (length - 2) + [0] * 2])
        return batch | ({"labels": ids.clone()} if labels else {})

    return make


def family(architecture: str, config: str, inputs: Callable[[], Any], **settings: Any) -> Callable[[], Subject]:
    """A builder of a model of transformers with a loss of its own."""

    def build() -> Subject:
        import transformers

        settled = getattr(transformers, config)(**settings)
        return Subject(getattr(transformers, architecture)(settled), inputs, named_loss)

    return build


def pictures(size: int = 16, labels: int = 3) -> Callable[[], dict[str, Tensor]]:
    """Two pictures and their classes."""
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, labels, (2,))}


def pictures_and_words() -> dict[str, Any]:
    return {**words(labels=False)(), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def speech() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 10, (2, 3))}


def spectrogram() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 48, (2, 5))}


def music() -> Subject:
    from transformers import EncodecConfig, MusicgenConfig, MusicgenForConditionalGeneration, T5Config
    from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

    decoder = MusicgenDecoderConfig(
        vocab_size=33, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, num_codebooks=2,
        max_position_embeddings=32, pad_token_id=32, bos_token_id=32, dropout=0.1, layerdrop=0.0,
    )  # fmt: skip
    text = T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    audio = EncodecConfig(
        hidden_size=8, num_filters=2, codebook_size=32, codebook_dim=8, num_lstm_layers=1, upsampling_ratios=[4, 2]
    )
    config = MusicgenConfig(text_encoder=text, audio_encoder=audio, decoder=decoder)
    model = MusicgenForConditionalGeneration(config)
    model.decoder.config.decoder_start_token_id = model.config.decoder_start_token_id = 32

    def inputs() -> dict[str, Tensor]:
        return {**words(labels=False)(), "labels": torch.randint(0, 32, (2, 5, 2))}

    return Subject(model, inputs, named_loss)


FAMILIES: dict[str, Callable[[], Subject]] = {
    "bert": family("BertForMaskedLM", "BertConfig", words(), **TEXT, max_position_embeddings=16),
    "distilbert": family(
        "DistilBertForMaskedLM", "DistilBertConfig", words(),
        vocab_size=48, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=16,
    ),
    "gpt2": family(
        "GPT2LMHeadModel", "GPT2Config", words(),
        vocab_size=48, n_positions=16, n_embd=16, n_layer=1, n_head=2, **IDS,
    ),
    "opt": family(
        "OPTForCausalLM", "OPTConfig", words(),
        vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32,
        max_position_embeddings=16, word_embed_proj_dim=16, **IDS,
    ),
    "llama": family("LlamaForCausalLM", "LlamaConfig", words(), **TEXT, **IDS, max_position_embeddings=16),
    "qwen3": family(
        "Qwen3ForCausalLM", "Qwen3Config", words(),
        **TEXT, **IDS, num_key_value_heads=1, head_dim=8, max_position_embeddings=16,
    ),
    "mixtral": family(
        "MixtralForCausalLM", "MixtralConfig", words(),
        **TEXT, **IDS, num_key_value_heads=1, num_local_experts=3, max_position_embeddings=16, output_router_logits=True,
    ),
    "mamba": family(
        "MambaForCausalLM", "MambaConfig", words(mask=False),
        vocab_size=48, hidden_size=16, num_hidden_layers=1, state_size=4, **IDS,
    ),
    "rwkv": family(
        "RwkvForCausalLM", "RwkvConfig", words(mask=False),
        vocab_size=48, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16, context_length=16,
        use_cache=False, **IDS,
    ),
    "t5": family(
        "T5ForConditionalGeneration", "T5Config", words(),
        vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
    ),
    "bart": family(
        "BartForConditionalGeneration", "BartConfig", words(),
        vocab_size=48, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16,
        decoder_start_token_id=2, forced_eos_token_id=2, **IDS,
    ),
    "whisper": family(
        "WhisperForConditionalGeneration", "WhisperConfig", spectrogram,
        vocab_size=48, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
        max_target_positions=16, decoder_start_token_id=1, dropout=0.1, **IDS,
    ),
    "wav2vec2": family(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", speech,
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_length=2, mask_time_prob=0.3, layerdrop=0.2,
    ),
    "musicgen": music,
    "vit": family(
        "ViTForImageClassification", "ViTConfig", pictures(),
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        num_labels=3, hidden_dropout_prob=0.1,
    ),
    "clip": family(
        "CLIPModel", "CLIPConfig", pictures_and_words,
        text_config={**TEXT, **IDS, "max_position_embeddings": 16, "projection_dim": 8},
        vision_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
            "image_size": 16, "patch_size": 8, "projection_dim": 8,
        },
        projection_dim=8,
    ),
    "resnet": family(
        "ResNetForImageClassification", "ResNetConfig", pictures(),
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3,
    ),
    "convnext": family(
        "ConvNextForImageClassification", "ConvNextConfig", pictures(32),
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.2, num_labels=3,
    ),
}  # fmt: skip
"""Models of transformers, one a family, with the losses that they compute themselves."""

EVERY: dict[str, Callable[[], Subject]] = {**OWN, **FAMILIES}


# ---- photographs


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def random_states() -> tuple[bytes, ...]:
    """The state of every random generator of the process that a training loop draws from."""
    return (
        torch.get_rng_state().numpy().tobytes(),
        pickle.dumps(np.random.get_state()),
        pickle.dumps(random.getstate()),
    )


def exact(x: Tensor | None) -> object:
    """A tensor as something that compares equal only to a tensor equal bit for bit, laid out the same way."""
    if x is None:
        return None
    x = x.detach()
    kind = str(x.dtype), str(x.layout), str(x.device)
    if x.is_nested:
        return kind, tuple(exact(part) for part in x.unbind())
    if x.layout == torch.sparse_coo:
        return kind, tuple(x.shape), x.is_coalesced(), exact(x._indices()), exact(x._values())
    if x.is_quantized:
        return kind, tuple(x.shape), exact(x.int_repr())
    where = tuple(x.shape), x.stride(), x.is_conj(), x.is_neg()
    x = x.resolve_conj().resolve_neg().contiguous()
    return kind, where, x.reshape(-1).view(torch.uint8).numpy().tobytes()


def graph_of(loss: Tensor) -> list[str]:
    """Names of the autograd nodes that can be reached from a loss, in a fixed order, each once."""
    names: list[str] = []
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        stack.extend(parent for parent, _ in node.next_functions)
    return names


HOOK_TABLES = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def hooks_of(model: nn.Module) -> dict[str, list[str]]:
    """What is in every hook table of a model and of its parameters, by type."""
    found = {}
    for path, module in model.named_modules():
        for table in HOOK_TABLES:
            held = getattr(module, table, None)
            if held:
                found[f"{path}.{table}"] = [type(hook).__name__ for hook in held.values()]
    for name, parameter in model.named_parameters():
        held = list((parameter._backward_hooks or {}).values()) + list(
            (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        )
        if held:
            found[name] = [type(hook).__name__ for hook in held]
    return found


def shape_of(model: nn.Module) -> dict[str, object]:
    """What a model is made of, apart from values: attributes, classes, modes, keys."""
    shown: dict[str, object] = {"state_dict": list(model.state_dict())}
    for path, module in model.named_modules():
        shown[f"module {path}"] = (type(module).__qualname__, module.training, sorted(vars(module)))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        attributes = sorted(getattr(parameter, "__dict__", ()))
        shown[f"parameter {name}"] = (type(parameter).__name__, parameter.requires_grad, parameter.is_leaf, attributes)
    return shown


def values_of(model: nn.Module) -> dict[str, object]:
    """Every parameter, its gradient and its version, and every buffer."""
    shown: dict[str, object] = {}
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            continue
        gradient = parameter.grad
        shown[f"parameter {name}"] = exact(parameter)
        shown[f"gradient of {name}"] = exact(gradient)
        shown[f"version of {name}"] = parameter._version
        if gradient is not None and gradient.layout == torch.strided and gradient.numel():
            shown[f"memory of the gradient of {name}"] = owners.setdefault(gradient.data_ptr(), name)
    for name, buffer in model.named_buffers():
        if not isinstance(buffer, nn.parameter.UninitializedBuffer):
            shown[f"buffer {name}"] = exact(buffer)
    return shown


Photograph = dict[str, object]
Attached = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


def unwatched(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """What to attach for the run that shows how things are without."""
    return contextlib.nullcontext()


def photograph(build: Callable[[], Subject], attached: Attached = unwatched, steps: int = 5) -> Photograph:
    """Build a model, let it evaluate, train and evaluate while ``attached`` is in force, and show everything: outputs,
    losses, graphs, gradients, parameters, buffers, optimizer states, random states, attributes, hooks left behind. Hooks
    take their fast lane from the fourth step on."""
    seed_everything(0)
    subject = build()
    model = subject.model
    shown: Photograph = {}

    def show(prefix: str, things: Mapping[str, object]) -> None:
        shown.update({f"{prefix}: {name}": thing for name, thing in things.items()})

    with attached(subject.watched(model)):
        _evaluate(subject, torch.no_grad(), "evaluation before training", show)
        optimizers = subject.optimizers(model) if subject.trains else []
        model.train(subject.trains)
        for step in range(steps if subject.trains else 0):
            seen = 0

            def see(output: Any, loss: Tensor, at: str = f"step {step}") -> None:
                nonlocal seen
                outputs = {f"output{name} of pass {seen}": exact(tensor) for name, tensor in tensors(output)}
                show(at, {**outputs, f"loss {seen}": exact(loss), f"graph {seen}": graph_of(loss)})
                seen += 1

            subject.step(subject, optimizers, see)
            show(f"step {step}", values_of(model) | {"random states": random_states()})
        for i, optimizer in enumerate(optimizers):
            states = _states(optimizer)
            show(f"optimizer {i}", states)
        if subject.scaler is not None:
            show("scaler", {"state": repr(subject.scaler.state_dict())})
        _evaluate(subject, torch.inference_mode(), "evaluation", show)
        if subject.trains:
            _backward_in_eval(subject, show)
        show("while attached", shape_of(model))
    show("at the end", values_of(model) | shape_of(model) | {"random states": random_states()})
    show("at the end", {"hooks": hooks_of(model)})
    model.train(subject.trains)
    kept = apply_kept(subject)
    shown["random states at last"] = random_states()
    death = weakref.ref(model)
    del model, subject, optimizers
    gc.collect()
    shown["the model dies while its outputs are kept"] = death() is None
    del kept
    if death() is not None:
        gc.collect()
    shown["the model dies"] = death() is None
    return shown


def apply_kept(subject: Subject) -> list[Tensor]:
    """A forward pass after all, and tensors of it that somebody keeps."""
    return [tensor for _, tensor in tensors(subject.call(subject.model, subject.inputs()))]


def _states(optimizer: Optimizer) -> dict[str, object]:
    found: dict[str, object] = {}
    for i, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found[f"{i}.{name}"] = (
                [exact(tensor) for _, tensor in tensors([value])] if not isinstance(value, int | float) else value
            )
    return found


def _evaluate(
    subject: Subject, mode: contextlib.AbstractContextManager[Any], when: str, show: Callable[..., None]
) -> None:
    subject.model.eval()
    with mode:
        output = subject.call(subject.model, subject.inputs())
    show(when, {f"output{name}": exact(tensor) for name, tensor in tensors(output)})
    show(when, {"random states": random_states()})


def _backward_in_eval(subject: Subject, show: Callable[..., None]) -> None:
    subject.model.eval()
    for parameter in subject.model.parameters():
        parameter.grad = None
    output = subject.call(subject.model, subject.inputs())
    loss = subject.loss(output)
    show("backward in eval mode", {"loss": exact(loss), "graph": graph_of(loss)})
    loss.backward()
    show("backward in eval mode", values_of(subject.model))


def assert_same(bare: Photograph, other: Photograph) -> None:
    """Assert that two photographs show the same, and say the first thing in which they differ."""
    for name in bare:
        assert name in other, f"{name}: only without attach"
        if bare[name] != other[name]:
            raise AssertionError(f"{name}: {_brief(bare[name])} without attach, {_brief(other[name])} with it")
    extra = [name for name in other if name not in bare]
    assert not extra, f"only with attach: {extra}"


def _brief(thing: object) -> str:
    text = repr(thing)
    return text if len(text) < 400 else f"{text[:200]}… (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"
