"""Models and losses that are as they should be, each with something that looks like a failure and is none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.rules.cases import Case, batches, trained
from tests.rules.parts import Composed, Words, classes, mlp, regression, tokens


def sparse_embeddings() -> Case:
    """Sparse gradients: only the rows that were used."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(200, 8, sparse=True)
            self.head = nn.Linear(8, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.bag(ids))

    model = Bag()
    first, second = (
        torch.optim.SparseAdam(list(model.bag.parameters()), 1e-2),
        torch.optim.Adam(model.head.parameters()),
    )

    def step(number: int) -> None:
        first.zero_grad(), second.zero_grad()
        (model(tokens(number)) - 1).square().mean().backward()
        first.step(), second.step()

    return Case(model, step)


def tied_language_model() -> Case:
    """A causal language model whose head is its embedding, with padding, labels shifted once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 16, padding_idx=0)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            return self.head(self.layer(self.embedding(ids), src_mask=causal, is_causal=True))

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = tokens(number).clamp(min=1)
        ids[:4, 9:] = 0
        return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)

    return trained(Model(), loss)


def masked_language_model() -> Case:
    """One token in seven is supervised, in a few batches none but one."""

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = tokens(number)
        chosen = torch.rand(ids.shape) < (0.15 if number % 3 else 0.02)
        chosen[0, 0] = True
        labels = torch.where(chosen, ids, -100)
        return functional.cross_entropy(model(torch.where(chosen, 1, ids)).flatten(0, 1), labels.flatten())

    return trained(Words(), loss)


class Experts(nn.Module):
    """Top-1 routing between four experts."""

    def __init__(self, many: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(6, many)
        self.experts = nn.ModuleList(mlp(6, 8, 6) for _ in range(many))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = chosen == number
            if at.any():
                out[at] = expert(x[at]) * weight[at, None]
        return self.head(x + out)


def mixture_of_experts() -> Case:
    """Every expert gets some tokens, in some steps."""
    return trained(Experts(), lambda m, i: m(batches(64, 6)[i]).sub(1).square().mean())


def many_experts_and_few_tokens() -> Case:
    """More experts than tokens in a batch: most are not chosen in a few steps."""
    return trained(Experts(32), regression, steps=4)


def heads_in_turn() -> Case:
    """Two tasks, one head each, one task a step."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Linear(6, 8), nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(8, 3)})

        def forward(self, x: Tensor, task: str) -> Tensor:
            return self.heads[task](self.trunk(x).relu())

    return trained(Tasks(), lambda m, i: m(batches(16, 6)[i], "ab"[i % 2]).square().mean())


def dropped_layers() -> Case:
    """Layers are left out at random."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.head = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand(()) > 0.3:
                    x = x + layer(x).relu()
            return self.head(x)

    return trained(Stack(), regression, steps=12)


def zero_initialised_branches() -> Case:
    """Residual branches that begin at zero, and a gate that does."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.gate = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.zeros(1))
            self.head = nn.Linear(6, 1)
            nn.init.zeros_(self.outer.weight), nn.init.zeros_(self.outer.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.gate * self.inner(x) + self.outer(self.inner(x).relu()))

    return trained(Branch(), regression)


def sparse_rectifiers() -> Case:
    """Nine units in ten are zero, none for all samples."""
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.no_grad():
        model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True))
        model[0].bias.fill_(-1.2)
    return trained(model, lambda m, i: m(batches(256, 6)[i]).sub(1).square().mean())


def biases_that_normalisation_takes_away() -> Case:
    """Biases before batch and layer normalisation have a gradient of rounding noise alone."""
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)
    )
    return trained(model, regression)


def diffusion() -> Case:
    """Noise of every strength, a time that is drawn, a condition that is dropped now and then."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.label, self.net = nn.Linear(1, 6), nn.Embedding(5, 6), mlp(6, 16, 6)

        def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
            return self.net(x + self.time(t[:, None].cos()) + self.label(label))

    def loss(model: nn.Module, number: int) -> Tensor:
        clean, noise, t = batches(16, 6)[number], torch.randn(16, 6), torch.rand(16)
        label = torch.where(torch.rand(16) < 0.1, 0, torch.randint(1, 5, (16,)))
        noisy = (1 - t[:, None]) * clean + t[:, None] * noise
        return (model(noisy, t, label) - noise).square().mean()

    return trained(Denoiser(), loss)


def quantised_with_straight_through() -> Case:
    """Rounding with a straight-through estimator, and a codebook."""
    return trained(Composed(lambda h: h + (h.round() - h).detach()), regression)


def contrastive() -> Case:
    """InfoNCE: every pair of the batch against every other, the target is the diagonal."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.scale = nn.Linear(6, 8), nn.Linear(6, 8), nn.Parameter(torch.tensor(2.6))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = functional.normalize(self.left(x), dim=-1), functional.normalize(self.right(y), dim=-1)
            return a @ b.T * self.scale.exp()

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number]
        logits = model(x, x + 0.1 * torch.randn(16, 6))
        return functional.cross_entropy(logits, torch.arange(16))

    return trained(Pairs(), loss)


def ranking() -> Case:
    """Every score against every other, on purpose."""

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number]
        score = model(x).squeeze(-1)
        apart = score.unsqueeze(1) - score.unsqueeze(0)
        return functional.softplus(-apart * (x[:, :1] - x[:, :1].T).sign()).mean()

    return trained(mlp(6, 8, 1), loss)


def annealed_auxiliary_loss() -> Case:
    """The weight of a second loss is zero for the first steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.main, self.extra = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.trunk(x).tanh()
            return self.main(h), self.extra(h)

    def loss(model: nn.Module, number: int) -> Tensor:
        first, second = model(batches(16, 6)[number])
        return first.sub(1).square().mean() + max(0.0, 0.1 * (number - 4)) * second.square().mean()

    return trained(Model(), loss)


def recurrent_in_pieces() -> Case:
    """Truncated back-propagation: the state is detached between pieces."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 1)
            self.register_buffer("state", torch.zeros(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.state
            for part in x.unbind(1):
                h = self.cell(part, h)
            self.state = h.detach()
            return self.head(h)

    return trained(Net(), lambda m, i: m(batches(16, 12, 6)[i]).sub(1).square().mean())


def deep_with_residuals() -> Case:
    """Sixteen normalised residual layers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(functional.gelu(self.up(self.norm(x))))

    model = nn.Sequential(nn.Linear(6, 16), *[Block() for _ in range(16)], nn.Linear(16, 1))
    return trained(model, regression, lr=1e-3)


def classifier_that_converges() -> Case:
    """A task so easy that the loss goes to nearly zero, and the gradients with it."""
    return trained(
        mlp(6, 32, 2, activation=nn.ReLU),
        lambda m, i: functional.cross_entropy(m(10 * batches(64, 6)[i % 8]), (batches(64, 6)[i % 8][:, 0] > 0).long()),
        lr=0.05,
        steps=40,
    )


def variational() -> Case:
    """An auto-encoder that samples, with a weight of the second term that grows from zero."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, spread = self.encode(x).chunk(2, -1)
            return self.decode(mean + spread.exp() * torch.randn_like(mean)), mean, spread

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number]
        out, mean, spread = model(x)
        second = (mean.square() + (2 * spread).exp() - 2 * spread - 1).mean()
        return (out - x).square().mean() + number / 8 * second

    return trained(Encoder(), loss)


def checkpointed_with_trained_front() -> Case:
    """Reentrant checkpointing where the input requires a gradient."""
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.block, self.head = nn.Linear(6, 8), mlp(8, 8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, self.front(x), use_reentrant=True))

    return trained(Model(), regression)


def classified() -> Case:
    """Plain classification with dropout, label smoothing and clipping that rarely acts."""
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2))
    return trained(
        model, lambda m, i: functional.cross_entropy(m(batches(16, 6)[i]), classes(i), label_smoothing=0.1), lr=3e-3
    )


def fitted_with_a_margin() -> Case:
    """Every pair is further apart than the margin asks for: the loss is exactly zero."""
    model = mlp(6, 16, 4)

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number]
        return functional.triplet_margin_loss(model(x), model(x + 1e-3), model(-x), margin=0.01)

    return trained(model, loss)


def critic_without_a_sigmoid() -> Case:
    """A Wasserstein critic, whose loss is a difference of two means: the bias of its last layer cancels."""
    real, made = batches(16, 6), batches(16, 6, seed=3) + 1.0
    return trained(mlp(6, 8, 1), lambda critic, i: critic(made[i]).mean() - critic(real[i]).mean(), lr=1e-3)


HEALTHY_MODELS: tuple[Callable[[], Case], ...] = (
    sparse_embeddings,
    tied_language_model,
    masked_language_model,
    mixture_of_experts,
    many_experts_and_few_tokens,
    heads_in_turn,
    dropped_layers,
    zero_initialised_branches,
    sparse_rectifiers,
    biases_that_normalisation_takes_away,
    diffusion,
    quantised_with_straight_through,
    contrastive,
    ranking,
    recurrent_in_pieces,
    deep_with_residuals,
    classifier_that_converges,
    variational,
    checkpointed_with_trained_front,
    classified,
)
"""Nothing may be found."""

MEANT_MODELS: tuple[Callable[[], Case], ...] = (
    annealed_auxiliary_loss,
    fitted_with_a_margin,
    critic_without_a_sigmoid,
)
"""What may well be meant: a note at most."""
