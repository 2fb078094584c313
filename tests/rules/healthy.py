"""Training that is as it should be, each with something that looks like a failure and is none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.rules.broken import Composed, Words, classes, mlp, regression, tokens
from tests.rules.cases import Case, batches, trained


def warm_up_from_zero() -> Case:
    """The first step of a warm-up has a learning rate of zero, the last of the decay as well."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 3, (11 - step) / 8))
    case = trained(model, regression, optimizer=optimizer, steps=12)
    case.after = lambda number, trace: schedule.step()
    return case


def groups_of_which_one_is_frozen_by_its_rate() -> Case:
    """Discriminative rates: the first group stands still for two steps, then joins."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], 1e-2
    )
    case = trained(model, regression, optimizer=optimizer)

    def thaw(number: int, trace: Any) -> None:
        if number == 1:
            optimizer.param_groups[0]["lr"] = 1e-3

    case.after = thaw
    return case


def accumulation() -> Case:
    """Four backward passes a step, gradients not cleared in between."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(number: int) -> None:
        (regression(model, number) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return Case(model, step, steps=16)


def cleared_to_zeros_the_old_way() -> Case:
    """Gradients are zeroed behind autograd's back."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(number: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        regression(model, number).backward()
        optimizer.step()

    return Case(model, step)


def head_alone_without_freezing() -> Case:
    """Only the head is in the optimizer; nobody froze the rest."""
    model = mlp(6, 16, 16, 1)
    return trained(model, regression, optimizer=torch.optim.Adam(model[4].parameters(), 1e-2))


def low_rank_adapter() -> Case:
    """LoRA: the base is frozen, one factor begins at zero, so the other has no gradient at first."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
            self.head = nn.Linear(6, 1)
            self.base.requires_grad_(False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.base(x) + self.up(self.down(x))).tanh())

    model = Adapted()
    return trained(model, regression, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))


def frozen_then_thawed() -> Case:
    """The backbone is frozen for three steps, in evaluation mode, and then trained as well."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    model[0].eval()
    case = trained(model, regression)

    def thaw(number: int, trace: Any) -> None:
        if number == 2:
            model[0].requires_grad_(True)
            model.train()

    case.after = thaw
    return case


class Momentum(nn.Module):
    """A network and one that follows it, frozen, in training mode (BYOL, MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(theirs, 0.05)
            wanted = self.target(y)
        return 1 - functional.cosine_similarity(self.predictor(self.online(x)), wanted).mean()


def momentum_encoder() -> Case:
    """A target network that follows by a moving average, its batch statistics too."""
    model = Momentum()
    return trained(model, lambda m, i: m(batches(16, 6)[i], batches(16, 6, seed=2)[i]))


class Adversaries(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(4, 16, 6, activation=nn.ReLU), mlp(6, 16, 1, activation=nn.LeakyReLU)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)


def adversarial(attach_to: str = "") -> Case:
    """A GAN in one module: each player's gradients are cleared right before its own turn."""
    both = Adversaries()
    first = torch.optim.Adam(both.discriminator.parameters(), 2e-3)
    second = torch.optim.Adam(both.generator.parameters(), 2e-3)

    def step(number: int) -> None:
        real, noise = batches(16, 6)[number], batches(16, 4, seed=2)[number]
        fake = both(noise)
        first.zero_grad()
        verdict = both.discriminator(torch.cat([real, fake.detach()]))
        wanted = torch.cat([torch.ones(16, 1), torch.zeros(16, 1)])
        functional.binary_cross_entropy_with_logits(verdict, wanted).backward()
        first.step()
        second.zero_grad()
        functional.binary_cross_entropy_with_logits(both.discriminator(fake), torch.ones(16, 1)).backward()
        second.step()

    return Case({"": both, "generator": both.generator, "discriminator": both.discriminator}[attach_to], step)


def generator_alone() -> Case:
    """The generator is watched; its loss goes through the discriminator, which is not."""
    return adversarial("generator")


def discriminator_alone() -> Case:
    """The discriminator is watched; the generator trains through it."""
    return adversarial("discriminator")


def network_inside_the_loss() -> Case:
    """A perceptual loss: a second network, not frozen, that nobody trains, outside the model."""
    judge = mlp(1, 8, 4)

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number]
        return (judge(model(x)) - judge(x.sum(-1, keepdim=True)).detach()).square().mean()

    return trained(mlp(6, 8, 1), loss)


def learned_weights_of_losses() -> Case:
    """Weights of two losses are learned, outside the model, by the same optimizer."""
    model, weights = mlp(6, 8, 2), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), weights], 1e-2)

    def loss(model: nn.Module, number: int) -> Tensor:
        out, x = model(batches(16, 6)[number]), batches(16, 6)[number]
        each = torch.stack([(out[:, 0] - x.sum(-1)).square().mean(), (out[:, 1] - x[:, 0]).square().mean()])
        return (each * (-weights).exp() + weights).sum()

    return trained(model, loss, optimizer=optimizer)


def gradients_of_the_input() -> Case:
    """A physics-informed loss: derivatives with respect to the input, which requires a gradient."""

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 1)[number].requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope - x.cos()).square().mean() + (model(torch.zeros(1, 1))).square().mean()

    return trained(mlp(1, 16, 1), loss)


def autocast_with_a_scaler() -> Case:
    """Mixed precision with unscaling and clipping in the right order; the first scale is too high."""
    model = mlp(6, 16, 1, activation=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(batches(16, 6)[number % 8])
        loss = (out.float() - 30).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    return Case(model, step, steps=24, options={"scaler": scaler})


def clipped_at_every_step() -> Case:
    """Gradients are clipped to one and the same norm in every step."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (100 * regression(model, number)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Case(model, step)


def half_precision_that_learns() -> Case:
    """bfloat16 weights with a rate that they can follow."""
    model = mlp(6, 8, 1).bfloat16()
    return trained(model, lambda m, i: m(batches(16, 6)[i].bfloat16()).float().sub(1).square().mean(), lr=1e-2)


def evaluation_in_between() -> Case:
    """Evaluation after every step, on other data, and back to training mode."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    case = trained(model, regression)

    def evaluate(number: int, trace: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(batches(32, 6, seed=9)[number % 4])
        model.train()

    case.after = evaluate
    return case


def evaluation_on_training_data() -> Case:
    """The loss on the training batch itself is looked at without gradients after every step."""
    model = mlp(6, 8, 1)
    case = trained(model, regression)

    def look(number: int, trace: Any) -> None:
        with torch.no_grad():
            model(batches(16, 6)[number])

    case.after = look
    return case


def part_in_evaluation_mode() -> Case:
    """A frozen backbone is kept in evaluation mode inside a model in training mode."""
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)).requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(8, 1))
    backbone.eval()
    return trained(model, regression, optimizer=torch.optim.Adam(model[1].parameters(), 1e-2))


def averaged() -> Case:
    """A moving average that follows parameters and buffers."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    case = trained(model, regression, options={"ema": average})
    case.after = lambda number, trace: average.update_parameters(model)
    return case


def kept_by_copy() -> Case:
    """The best state is kept as a copy."""
    case = trained(mlp(6, 8, 1), regression)
    case.after = lambda number, trace: trace.checkpoint("best", copy.deepcopy(case.model.state_dict()))
    return case


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


def graph_in_one_batch() -> Case:
    """A graph network: all nodes, and the same graph, in every step."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            def spread(h: Tensor) -> Tensor:
                return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])

            return self.second(spread(self.first(x).relu()))

    x, edges = batches(30, 6)[0], torch.randint(0, 30, (2, 90))
    return trained(Graph(), lambda m, i: functional.cross_entropy(m(x, edges), (x[:, 0] > 0).long()))


def one_batch_on_purpose() -> Case:
    """The tiny-batch test: one batch again and again, no loader."""
    x, y = batches(4, 6)[0], torch.tensor([0, 1, 2, 0])
    return trained(mlp(6, 16, 3), lambda m, i: functional.cross_entropy(m(x), y), steps=20)


def few_batches_in_order() -> Case:
    """Three batches in turn."""
    return trained(mlp(6, 8, 1), lambda m, i: regression(m, i % 3), steps=12)


def shuffled_by_a_loader() -> Case:
    """A loader that shuffles, several epochs, with validation data of its own."""
    train, held_out = batches(6, count=64), batches(6, count=16, seed=5)
    loader = DataLoader(TensorDataset(train), 16, shuffle=True)

    def stream() -> Iterator[Tensor]:
        while True:
            for (batch,) in loader:
                yield batch

    given = stream()
    model = mlp(6, 8, 1)
    case = trained(model, lambda m, i: m(next(given)).square().mean(), steps=12)

    def validate(number: int, trace: Any) -> None:
        with torch.no_grad():
            model(held_out)

    case.after = validate
    return case


def epoch_set() -> Case:
    """A distributed sampler whose epoch is set."""
    data = TensorDataset(batches(6, count=48))
    sampler = DistributedSampler(data, 1, 0, shuffle=True)
    loader = DataLoader(data, 16, sampler=sampler)

    def stream() -> Iterator[Tensor]:
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for (batch,) in loader:
                yield batch

    given = stream()
    return trained(mlp(6, 8, 1), lambda m, i: m(next(given)).square().mean(), steps=12)


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


def second_order() -> Case:
    """LBFGS: many passes over one batch a step."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=5)

    def step(number: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = regression(model, number)
            loss.backward()
            return loss

        optimizer.step(closure)

    return Case(model, step, steps=5)


def updated_by_hand() -> Case:
    """No optimizer at all."""
    model = mlp(6, 8, 1)

    def step(number: int) -> None:
        model.zero_grad()
        regression(model, number).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad

    return Case(model, step)


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


HEALTHY: tuple[Callable[[], Case], ...] = (
    warm_up_from_zero,
    groups_of_which_one_is_frozen_by_its_rate,
    accumulation,
    cleared_to_zeros_the_old_way,
    low_rank_adapter,
    frozen_then_thawed,
    momentum_encoder,
    adversarial,
    generator_alone,
    discriminator_alone,
    network_inside_the_loss,
    learned_weights_of_losses,
    gradients_of_the_input,
    autocast_with_a_scaler,
    clipped_at_every_step,
    half_precision_that_learns,
    evaluation_in_between,
    part_in_evaluation_mode,
    averaged,
    kept_by_copy,
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
    shuffled_by_a_loader,
    epoch_set,
    diffusion,
    quantised_with_straight_through,
    contrastive,
    ranking,
    recurrent_in_pieces,
    deep_with_residuals,
    second_order,
    updated_by_hand,
    classifier_that_converges,
    variational,
    checkpointed_with_trained_front,
    classified,
)
"""Nothing may be found."""

MEANT: tuple[Callable[[], Case], ...] = (
    head_alone_without_freezing,
    evaluation_on_training_data,
    graph_in_one_batch,
    one_batch_on_purpose,
    few_batches_in_order,
    annealed_auxiliary_loss,
    fitted_with_a_margin,
    critic_without_a_sigmoid,
)
"""What may well be meant: a note at most."""
