"""Steps, updates and batches that are as they should be, each with something that looks like a failure and is none."""

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

from tests.rules.cases import Case, batches, trained
from tests.rules.parts import mlp, regression


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


HEALTHY_STEPS: tuple[Callable[[], Case], ...] = (
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
    shuffled_by_a_loader,
    epoch_set,
    second_order,
    updated_by_hand,
)
"""Nothing may be found."""

MEANT_STEPS: tuple[Callable[[], Case], ...] = (
    head_alone_without_freezing,
    evaluation_on_training_data,
    graph_in_one_batch,
    one_batch_on_purpose,
    few_batches_in_order,
)
"""What may well be meant: a note at most."""
