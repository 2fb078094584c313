"""Training that fails in a way that one rule must name. Each builder's docstring says what is wrong."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.rules.cases import Case, Ranks, Resumed, batches, trained


class Broken(NamedTuple):
    """A case and what must be found."""

    build: Callable[[], Case | Ranks | Resumed]
    rule: str
    cause: str | None
    evidence: dict[str, Any]


def regression(model: nn.Module, number: int) -> Tensor:
    x = batches(16, 6)[number % 8]
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


class Composed(nn.Module):
    """A front, something in between, a head."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(6, width), nn.Linear(width, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.front(x)))


def warm_up_by_whole_numbers() -> Case:
    """The factor of the schedule is an integer division: zero for a thousand steps."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)
    case = trained(model, regression, optimizer=optimizer)
    case.after = lambda number, trace: schedule.step()
    return case


def never_cleared() -> Case:
    """zero_grad is never called."""
    model = mlp(6, 8, 1)
    return trained(model, regression, optimizer=torch.optim.SGD(model.parameters(), 1e-3), clear=False)


def head_replaced_after_optimizer() -> Case:
    """The optimizer still holds the weights of the head that was thrown away."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model[2] = nn.Linear(8, 1)
    return trained(model, regression, optimizer=optimizer)


def optimizer_of_another_copy() -> Case:
    """The optimizer was made of a model that was then built anew."""
    optimizer = torch.optim.Adam(mlp(6, 8, 1).parameters(), 1e-2)
    return trained(mlp(6, 8, 1), regression, optimizer=optimizer)


def one_module_forgotten() -> Case:
    """A filter by name misses one module in the middle."""
    model = Composed(torch.tanh)
    model.between = nn.Linear(8, 8)
    chosen = [p for name, p in model.named_parameters() if "between" not in name]
    return trained(model, regression, optimizer=torch.optim.AdamW(chosen, 1e-2))


def frozen_with_momentum() -> Case:
    """The front is frozen after two steps; its gradient is left over and momentum goes on."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)

    def step(number: int) -> None:
        if number == 2:
            model[0].requires_grad_(False)
        else:
            optimizer.zero_grad()
        regression(model, number).backward()
        optimizer.step()
        if number >= 2:
            model[2].weight.grad = model[2].bias.grad = None

    def first_then_stale(number: int) -> None:
        if number < 2:
            step(number)
            return
        if number == 2:
            model[0].requires_grad_(False)
        for parameter in model[2].parameters():
            parameter.grad = None
        regression(model, number).backward()
        optimizer.step()

    return Case(model, first_then_stale)


def detached_between() -> Case:
    """A detach between front and head, with a function after the front."""
    return trained(Composed(lambda h: h.relu().detach()), regression)


def front_without_gradients() -> Case:
    """The front runs under no_grad though it is to be trained."""

    class Model(Composed):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.front(x)
            return self.head(h)

    return trained(Model(torch.tanh), regression)


def reentrant_checkpoint_of_data() -> Case:
    """Reentrant checkpointing of the first block, whose input is data."""

    class Model(Composed):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.front, x, use_reentrant=True))

    return trained(Model(torch.tanh), regression)


def choice_by_argmax() -> Case:
    """An embedding of the argmax: whole numbers have no gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.table = nn.Linear(6, 5), nn.Embedding(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(self.router(x).argmax(-1))

    return trained(Model(), regression)


def unused_head() -> Case:
    """A head whose result is returned and never used."""

    class Model(Composed):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.extra = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.front(x)
            self.extra(h)
            return self.head(h)

    return trained(Model(), regression)


def layers_in_a_dict() -> Case:
    """Layers in a plain dict of a plain object."""

    class Layers:
        def __init__(self) -> None:
            self.known = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}

    class Model(Composed):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.layers = Layers()

        def forward(self, x: Tensor) -> Tensor:
            h = self.front(x)
            for layer in self.layers.known.values():
                h = layer(h).tanh()
            return self.head(h)

    return trained(Model(), regression)


def scale_is_no_parameter() -> Case:
    """A tensor that requires a gradient, but is no nn.Parameter."""

    class Model(Composed):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.scale = torch.ones(8, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.front(x) * self.scale)

    return trained(Model(), regression)


def rounded() -> Case:
    """A hard quantiser in the middle, without a straight-through estimator."""
    return trained(Composed(torch.floor), regression)


def softmax_over_one() -> Case:
    """Attention over a dimension of size one."""
    return trained(Composed(lambda h: h.mean(-1, keepdim=True).softmax(-1).expand(-1, 8)), regression)


def normalised_single() -> Case:
    """Layer normalisation of one element."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.norm, self.head = nn.Linear(6, 1), nn.LayerNorm(1), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.front(x)))

    return trained(Model(), regression)


def groups_of_one_channel() -> Case:
    """Group normalisation with as many groups as channels, over vectors."""
    front, norm = nn.Linear(6, 4), nn.GroupNorm(4, 4)
    return trained(nn.Sequential(front, norm, nn.Linear(4, 1)), regression)


def centred_on_itself() -> Case:
    """The mean over one element is taken away: the two gradients cancel."""

    def centred(h: Tensor) -> Tensor:
        one = h.mean(-1, keepdim=True)
        return (one - one.mean(-1, keepdim=True)).expand(-1, 8)

    return trained(Composed(centred), regression)


def both_factors_zero() -> Case:
    """Two factors of a product begin at zero."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 1)
            self.down, self.up = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(2, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down @ self.up

    return trained(Model(), regression)


def condition_multiplied_away() -> Case:
    """The keep mask of condition dropout is inverted: the condition is multiplied by zero."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.caption, self.net = nn.Linear(4, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor, caption: Tensor) -> Tensor:
            keep = (torch.rand(len(x), 1) > 1.0).float()
            return self.net(x + self.caption(caption) * keep)

    captions = batches(16, 4, seed=2)

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number]
        return (model(x, captions[number]) - x.sum(-1, keepdim=True)).square().mean()

    return trained(Model(), loss)


def deep_sigmoids() -> Case:
    """Twelve layers of sigmoids."""
    return trained(mlp(6, *[16] * 12, 1, activation=nn.Sigmoid), regression, lr=1e-3)


def too_large_a_rate() -> Case:
    """Gradient descent beyond the largest stable rate."""
    model = nn.Linear(6, 1)
    return trained(model, regression, optimizer=torch.optim.SGD(model.parameters(), 5.0))


def growing_recurrence() -> Case:
    """A recurrent cell whose gain is above one, over forty steps in time."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 1)
            with torch.no_grad():
                self.cell.weight.copy_(1.5 * torch.eye(6))

        def forward(self, x: Tensor) -> Tensor:
            h = x
            for _ in range(40):
                h = self.cell(h)
            return self.head(h)

    return trained(Model(), regression, lr=1e-5)


def memory_with_gain() -> Case:
    """A rectified recurrent network of torch's whose recurrent weights have a gain of two, over thirty steps in time."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.head = nn.RNN(1, 4, nonlinearity="relu", batch_first=True), nn.Linear(4, 1)
            with torch.no_grad():
                self.memory.weight_hh_l0.copy_(2.0 * torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.memory(x)[0][:, -1])

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-30)
    return trained(model, lambda m, i: m(batches(8, 30, 1)[i]).square().mean(), optimizer=optimizer)


def column_against_row() -> Case:
    """Predictions (N, 1) minus targets (N,)."""
    return trained(mlp(6, 8, 1), lambda m, i: (m(batches(16, 6)[i]) - batches(16, 6)[i].sum(-1)).square().mean())


def row_against_column() -> Case:
    """Predictions (N,) against targets (N, 1) in a loss function of torch's, inside the model."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 8, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.smooth_l1_loss(self.net(x).squeeze(-1), y)

    return trained(Model(), lambda m, i: m(batches(16, 6)[i], batches(16, 6)[i].sum(-1, keepdim=True)))


def classes(number: int) -> Tensor:
    return (batches(16, 6)[number][:, 0] > 0).long()


def softmax_twice() -> Case:
    """Cross-entropy of probabilities."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1))
    return trained(model, lambda m, i: functional.cross_entropy(m(batches(16, 6)[i]), classes(i)))


def sigmoid_twice() -> Case:
    """Binary cross-entropy with logits, of probabilities."""
    model = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid())
    return trained(
        model,
        lambda m, i: functional.binary_cross_entropy_with_logits(m(batches(16, 6)[i]).squeeze(-1), classes(i).float()),
    )


def tokens(number: int, length: int = 12) -> Tensor:
    return torch.randint(0, 20, (8, length), generator=torch.Generator().manual_seed(number))


class Words(nn.Module):
    """Logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def nothing_supervised() -> Case:
    """Every label is ignored; the sum is divided by at least one."""

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = tokens(number)
        return (
            functional.cross_entropy(model(ids).flatten(0, 1), torch.full_like(ids, -100).flatten(), reduction="sum")
            / 1
        )

    return trained(Words(), loss)


def shifted_twice() -> Case:
    """The labels are shifted already, and the loss shifts them again."""

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = tokens(number)
        logits, labels = model(ids[:, :-1]), ids[:, 1:]
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return trained(Words(), loss)


def dead_by_a_step() -> Case:
    """One step so large that a layer of rectifiers is negative for everything."""
    return _killed(nn.ReLU())


def dead_functional() -> Case:
    """The same with the functional form, which has no hook."""
    return _killed(None)


def _killed(module: nn.Module | None) -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.head, self.act = nn.Linear(6, 8), nn.Linear(8, 1), module

        def forward(self, x: Tensor) -> Tensor:
            h = self.front(x)
            return self.head(self.act(h) if self.act is not None else h.relu())

    model = Model()
    case = trained(model, regression, optimizer=torch.optim.SGD(model.parameters(), 1e-3))

    def kill(number: int, trace: Any) -> None:
        if number == 1:
            with torch.no_grad():
                model.front.bias.fill_(-100.0)

    case.after = kill
    return case


def collapsed_router() -> Case:
    """One expert gets every token."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3))
            self.head = nn.Linear(6, 1)
            with torch.no_grad():
                self.gate.bias[0] = 50.0

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                out[chosen == number] = expert(x[chosen == number]) * weight[chosen == number, None]
            return self.head(x + out)

    return trained(Model(), regression)


def left_in_evaluation() -> Case:
    """Evaluation after step 2, and no way back."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    case = trained(model, regression)
    case.after = lambda number, trace: model.eval() if number == 2 else None
    return case


def loaded_in_evaluation() -> Case:
    """Evaluation mode from the start."""
    case = left_in_evaluation()
    case.model.eval()
    return case


def frozen_but_counting() -> Case:
    """A frozen backbone whose batch normalisation goes on counting."""
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False)).requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(8, 1))
    return trained(model, regression, optimizer=torch.optim.Adam(model[1].parameters(), 1e-2))


def padding_overwritten() -> Case:
    """The weights are initialised after the embedding was made."""
    model = Words()
    model.embedding = nn.Embedding(20, 16, padding_idx=0)
    nn.init.normal_(model.embedding.weight)
    return trained(model, lambda m, i: functional.cross_entropy(m(tokens(i)).flatten(0, 1), tokens(i).flatten()))


def low_precision_weights() -> Case:
    """Weights near one in bfloat16 with a small rate."""
    model = nn.Linear(6, 6, bias=False)
    nn.init.constant_(model.weight, 1.0)
    model.bfloat16()
    return trained(model, lambda m, i: m(batches(16, 6)[i].bfloat16()).float().square().mean(), lr=1e-4)


def clipped_before_unscaling() -> Case:
    """Gradients are clipped while they are multiplied by the scale."""
    model = mlp(6, 8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(regression(model, number)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Case(model, step)


def skipped_for_ever() -> Case:
    """A gradient that is infinite whatever the scale."""
    model = Composed(lambda h: (h * 0).sqrt() + h)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(regression(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()

    return Case(model, step)


def fresh_iterator_each_step() -> Case:
    """next(iter(loader)) in the loop."""
    loader = DataLoader(TensorDataset(batches(6, count=64)), 16)
    case = trained(mlp(6, 8, 1), lambda m, i: m(next(iter(loader))[0]).square().mean())
    case.options = {}
    return case


def epoch_never_set() -> Case:
    """A distributed sampler whose epoch stays 0."""
    data = TensorDataset(batches(6, count=48))
    loader = DataLoader(data, 16, sampler=DistributedSampler(data, 1, 0, shuffle=True))
    given = [batch for _ in range(3) for (batch,) in loader]
    return trained(mlp(6, 8, 1), lambda m, i: m(given[i]).square().mean() + 0 * len(loader), steps=9)


def same_noise_in_every_worker() -> Case:
    """Two workers that draw the same numbers: every batch comes twice."""
    loader = DataLoader(TensorDataset(batches(6, count=64)), 16, num_workers=2)
    drawn = batches(16, 6)
    return trained(mlp(6, 8, 1), lambda m, i: m(drawn[i // 2]).square().mean() + 0 * len(loader))


class Normalised(Dataset[Tensor]):
    """Normalises the tensor it keeps."""

    def __init__(self) -> None:
        self.kept = torch.rand(8, 6)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return self.kept[index].sub_(0.5).div_(0.25)


def normalised_again_and_again() -> Case:
    """A transform in place on what the dataset keeps."""
    loader = DataLoader(Normalised(), 4)
    stream = (batch for _ in range(10) for batch in loader)
    return trained(mlp(6, 8, 1), lambda m, i: m(next(stream)).square().mean(), steps=10)


def empty_captions() -> Case:
    """Every caption is the empty one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.net = nn.Embedding(10, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor, caption: Tensor) -> Tensor:
            return self.net(x + self.text(caption).mean(1))

    caption = torch.zeros(16, 5, dtype=torch.long)

    def loss(model: nn.Module, number: int) -> Tensor:
        return (model(batches(16, 6)[number], caption) - 1).square().mean()

    return trained(Model(), loss)


def shared_between_splits() -> Case:
    """Shuffled before it was cut: a third of the validation samples are training samples."""
    data = batches(6, count=128)
    model = mlp(6, 8, 1)

    def validate(number: int, trace: Any) -> None:
        with torch.no_grad():
            model(data[96 + 4 * number : 100 + 4 * number] if number < 4 else data[8 * number : 8 * number + 2])

    case = trained(model, lambda m, i: m(data[12 * i : 12 * i + 12]).square().mean())
    case.after = validate
    return case


def slow_loader() -> Case:
    """Every batch takes much longer than a step."""
    import time

    def loss(model: nn.Module, number: int) -> Tensor:
        time.sleep(0.05)
        return regression(model, number)

    return trained(mlp(6, 8, 1), loss)


def hidden_state_with_its_graph() -> Case:
    """A state carried from step to step with its graph."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(6, 6)
            self.register_buffer("state", torch.zeros(16, 6))

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.cell(x) + 0.5 * self.state
            return self.state

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batches(16, 6)[number]).square().mean().backward(retain_graph=True)
        optimizer.step()

    return Case(model, step)


def snapshot_without_copy() -> Case:
    """The best state is kept without a copy."""
    case = trained(mlp(6, 8, 1), regression)
    case.after = lambda number, trace: trace.checkpoint("best", case.model.state_dict()) if number == 3 else None
    return case


def average_of_parameters_only() -> Case:
    """The average follows the parameters and forgets the running statistics."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average = copy.deepcopy(model)

    def follow(number: int, trace: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    case = trained(model, regression, options={"ema": average})
    case.after = follow
    return case


BROKEN = (
    Broken(warm_up_by_whole_numbers, "zero_lr", "scheduler_zero", {"count": 8}),
    Broken(never_cleared, "grads_not_zeroed", "missing_zero_grad", {"count": 7}),
    Broken(
        head_replaced_after_optimizer,
        "param_not_in_optimizer",
        "optimizer_holds_old_tensors",
        {"params": ["2.weight", "2.bias"]},
    ),
    Broken(optimizer_of_another_copy, "param_not_in_optimizer", "optimizer_holds_old_tensors", {"count": 4}),
    Broken(
        one_module_forgotten, "param_not_in_optimizer", "name_filter", {"params": ["between.weight", "between.bias"]}
    ),
    Broken(frozen_with_momentum, "frozen_param_changed", "stale_grad_or_momentum", {"params": ["0.weight", "0.bias"]}),
    Broken(detached_between, "detached", "detach", {"params": ["front.weight", "front.bias"], "modules": ["head"]}),
    Broken(front_without_gradients, "detached", "no_grad_region", {"modules": ["front"]}),
    Broken(
        reentrant_checkpoint_of_data,
        "detached",
        "reentrant_checkpoint_without_grad_input",
        {"params": ["front.weight", "front.bias"]},
    ),
    Broken(choice_by_argmax, "integer_conversion", "integer_conversion", {"params": ["router.weight", "router.bias"]}),
    Broken(unused_head, "unused_params", "branch_not_in_loss", {"params": ["extra.weight", "extra.bias"]}),
    Broken(
        layers_in_a_dict, "unregistered_params", "python_list_of_modules", {"owner": "", "attr": "layers", "count": 4}
    ),
    Broken(scale_is_no_parameter, "unregistered_params", "tensor_is_no_parameter", {"attr": "scale", "count": 1}),
    Broken(rounded, "zero_gradient", "non_differentiable_op", {"op": "FloorBackward0"}),
    Broken(softmax_over_one, "zero_gradient", "softmax_over_singleton_dim", {"params": ["front.bias", "front.weight"]}),
    Broken(normalised_single, "zero_gradient", "normalised_singleton", {"modules": ["norm"]}),
    Broken(centred_on_itself, "zero_gradient", "normalised_singleton", {"params": ["front.bias", "front.weight"]}),
    Broken(normalised_single, "constant_activations", "norm_over_single_element", {"modules": ["norm"]}),
    Broken(groups_of_one_channel, "constant_activations", "norm_over_single_element", {"modules": ["1"]}),
    Broken(both_factors_zero, "zero_gradient", "dead_product_init", {"params": ["down", "up"]}),
    Broken(
        condition_multiplied_away,
        "zero_gradient",
        "condition_always_dropped",
        {"params": ["caption.bias", "caption.weight"]},
    ),
    Broken(deep_sigmoids, "vanishing_gradients", "deep_sigmoid_stack", {"count": 13}),
    Broken(too_large_a_rate, "exploding_gradients", "learning_rate_too_high", {}),
    Broken(growing_recurrence, "exploding_gradients", "recurrent_gain_above_1", {"modules": ["cell"], "count": 40}),
    Broken(memory_with_gain, "exploding_gradients", "recurrent_gain_above_1", {"modules": ["memory"]}),
    Broken(column_against_row, "loss_broadcast", "shape_mismatch_broadcast", {"shapes": [[16, 1], [16]]}),
    Broken(row_against_column, "loss_broadcast", "shape_mismatch_broadcast", {"shapes": [[16], [16, 1]]}),
    Broken(softmax_twice, "double_softmax", "probabilities_used_as_logits", {"modules": ["1"], "op": "softmax"}),
    Broken(sigmoid_twice, "double_softmax", "probabilities_used_as_logits", {"modules": ["1"], "op": "sigmoid"}),
    Broken(nothing_supervised, "empty_mask", "no_supervised_token", {"count": 8}),
    Broken(shifted_twice, "misaligned_targets", "double_shift", {"shift": 2}),
    Broken(dead_by_a_step, "dead_activations", "dying_relu", {"modules": ["act"], "fraction": 1.0}),
    Broken(dead_functional, "dead_activations", "dying_relu", {"modules": ["front"]}),
    Broken(collapsed_router, "dead_modules", "router_collapse", {"modules": ["experts.1", "experts.2"]}),
    Broken(left_in_evaluation, "eval_mode_in_training", "missing_train_call", {"modules": ["", "1", "2"]}),
    Broken(loaded_in_evaluation, "eval_mode_in_training", "missing_train_call", {"modules": ["", "1", "2"]}),
    Broken(
        frozen_but_counting,
        "frozen_buffer_changed",
        "bn_train_mode_in_frozen_module",
        {"buffers": ["0.1.running_mean", "0.1.running_var"]},
    ),
    Broken(padding_overwritten, "padding_row_nonzero", "init_overwrites_padding", {"params": ["embedding.weight"]}),
    Broken(low_precision_weights, "update_rounded_away", "bf16_resolution", {"params": ["weight"]}),
    Broken(clipped_before_unscaling, "clip_on_scaled_grads", "missing_unscale", {"count": 8}),
    Broken(skipped_for_ever, "amp_skipped_steps", "gradient_nonfinite_at_any_scale", {"count": 8}),
    Broken(fresh_iterator_each_step, "repeated_batch", "iterator_recreated", {"period": 1, "unique_batches": 1}),
    Broken(epoch_never_set, "same_order_each_epoch", "set_epoch_missing", {"period": 3}),
    Broken(same_noise_in_every_worker, "duplicate_augmentation", "worker_rng_copied", {"lag": 1}),
    Broken(normalised_again_and_again, "input_drift", "inplace_transform_on_cached_data", {}),
    Broken(empty_captions, "constant_input", "empty_condition", {"input": "caption", "modules": ["text"]}),
    Broken(shared_between_splits, "split_overlap", "shuffle_before_slice", {"count": 8}),
    Broken(slow_loader, "stall", "loader_wait", {}),
    Broken(hidden_state_with_its_graph, "graph_growth", "buffer_not_detached", {"buffers": ["state"]}),
    Broken(snapshot_without_copy, "aliased_snapshot", "state_dict_without_copy", {"count": 4}),
    Broken(
        average_of_parameters_only,
        "ema_buffers_stale",
        "ema_skips_buffers",
        {"buffers": ["1.running_mean", "1.running_var"]},
    ),
)
