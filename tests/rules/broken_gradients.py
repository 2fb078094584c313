"""Training whose parameters do not get the gradient or the step that they should. Each builder's docstring says what is
wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.rules.cases import Broken, Case, batches, trained
from tests.rules.parts import Composed, mlp, regression


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


GRADIENTS = (
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
)
