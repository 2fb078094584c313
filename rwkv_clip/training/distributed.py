"""The processes that train together: where this one stands, how the model is spread over them, what they tell another.

One process needs nothing of this; ``torchrun`` sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for many.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from rwkv_clip.checkpoint import unwrap_model
from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.errors import InputError
from rwkv_clip.towers import Layer

# torch's sharded tensors and states take half as long to import as torch itself: they are imported where they are used.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

__all__ = [
    "Place", "every_rank", "full_model_state", "full_optimizer_state", "joined", "load_optimizer_state", "plain",
    "replicate", "shard", "synchronised",
]  # fmt: skip

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among those that train together."""

    device: torch.device
    rank: int = 0
    world: int = 1
    store: Any = None  # what the processes share besides collectives; None for one process

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes what is written once."""
        return self.rank == 0


@contextlib.contextmanager
def joined(device: str) -> Iterator[Place]:
    """Join the processes that the launcher started, over NCCL on GPUs and gloo on CPUs, and part with them at the end.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Raises:
        InputError: when ``cuda`` is asked for and there is none, or the launcher's variables do not fit.
    """
    local = _number("LOCAL_RANK", 0)
    chosen = _device(device, local)
    world = _number("WORLD_SIZE", 1)
    if world == 1:
        yield Place(chosen)
        return
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InputError(f"WORLD_SIZE is {world}, but {name} is not set: start the processes with torchrun")
    store, rank, world = next(iter(rendezvous("env://")))
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=PrefixStore("collectives", store), rank=rank, world_size=world)
    try:
        yield Place(chosen, rank, world, store)
    finally:
        dist.destroy_process_group()


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdigit():
        raise InputError(f"environment variable {variable}: expected a whole number, seen {text!r}")
    return int(text)


def _device(name: str, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("--device cuda: torch sees no GPU here; use --device cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def replicate(model: RWKVCLIP, place: Place) -> nn.Module:
    """The same model on every rank, gradients averaged after each backward pass. The model itself for one process."""
    if place.world == 1:
        return model
    return DistributedDataParallel(model, device_ids=[place.device] if place.device.type == "cuda" else None)


def shard(model: RWKVCLIP, place: Place) -> RWKVCLIP:
    """Spread every layer's parameters over the ranks (``fully_shard``), in place; each is whole only while it computes.

    A scalar cannot be spread: the logit scale stays whole on every rank, and a hook averages its gradient.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh(place.device.type, (place.world,))
    model.logit_scale = nn.Parameter(distribute_tensor(model.logit_scale.detach(), mesh, [Replicate()]))
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.logit_scale})
    for method in ("encode_image", "encode_text"):
        register_fsdp_forward_method(model, method)
    model.logit_scale.register_post_accumulate_grad_hook(_average_gradient)  # type: ignore[no-untyped-call]
    return model


def _average_gradient(parameter: Tensor) -> None:
    """Averaging once more what was averaged already changes nothing, so this may run after every micro-batch."""
    gradient = plain(cast(Tensor, parameter.grad))
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def plain(tensor: Tensor) -> Tensor:
    """A tensor that every rank holds whole, as an ordinary one; differentiable."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(Tensor, to_local())


@contextlib.contextmanager
def synchronised(model: nn.Module, wanted: bool) -> Iterator[None]:
    """A forward and backward pass after which the ranks' gradients are averaged, or not yet."""
    if isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
        return
    if (sharded := getattr(model, "set_requires_gradient_sync", None)) is not None:
        sharded(wanted)
    yield


def every_rank(value: Value, place: Place) -> list[Value]:
    """What each rank passed, in the order of ranks; every rank must call it."""
    if place.world == 1:
        return [value]
    values: list[Any] = [None] * place.world
    dist.all_gather_object(values, value)
    return values


def _whole() -> StateDictOptions:
    """Whole states instead of shards, on the CPU, whatever the model is spread over."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def full_model_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict, on the CPU, under the names of the bare model; every rank must call it, the first gets it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return cast(dict[str, Tensor], get_model_state_dict(unwrap_model(model), options=_whole()))


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's whole state by parameter name; every rank must call it, the first gets it. Empty before a step."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    # Asked for the state of an optimiser that has not stepped, torch lets it step, which would count as one.
    if not optimizer.state:
        return {}
    whole = get_optimizer_state_dict(unwrap_model(model), optimizer, options=_whole())
    return cast(dict[str, Any], whole.get("state", {}))


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put back what :func:`full_optimizer_state` returned; rates, betas and weight decay stay as they are now."""
    if not state:
        return
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    from torch.distributed.tensor import DTensor, distribute_tensor

    bare = unwrap_model(model)
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    names = {id(parameter): name for name, parameter in bare.named_parameters()}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    set_optimizer_state_dict(bare, optimizer, {"state": state, "param_groups": groups}, options=_whole())
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    if isinstance(bare.logit_scale, DTensor):  # a scalar's state comes back as ordinary tensors
        kept, like = optimizer.state[bare.logit_scale], bare.logit_scale
        kept |= {
            name: distribute_tensor(kept[name], like.device_mesh, like.placements) for name in kept if name != "step"
        }
