"""One optimiser step: forward, loss, backward, clipping, update. Legend: B pairs of a micro-batch, D channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rwkv_clip.checkpoint import unwrap_model
from rwkv_clip.loss import ClipLoss
from rwkv_clip.training.distributed import plain, synchronised
from rwkv_clip.training.precision import Precision, autocast

__all__ = ["LARGEST_LOGIT_SCALE", "MicroBatch", "Outcome", "Updater"]

LARGEST_LOGIT_SCALE = math.log(100)  # of the logarithm; Radford et al., "CLIP" (2021), section 2.5

MicroBatch = tuple[Tensor, Tensor]
"""Images (B, 3, S, S) and tokens (B, T), on the model's device."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step; all () and detached."""

    loss: Tensor  # nats; with ``local_loss`` this rank's part
    grad_norm: Tensor  # of all gradients together, unscaled, before clipping
    scale: Tensor  # exp(logit_scale) that the loss was computed with
    skipped: bool  # the scaler found infinities and let the parameters be


def _nothing(phase: str) -> None:
    pass


@dataclass(slots=True)
class Updater:
    """Makes optimiser steps. ``enter`` is told what begins: ``forward``, ``gather``, ``backward``, ``update``.

    Several micro-batches make the step that one batch of all their pairs would make, in the memory of one: the
    features of all are computed first without keeping activations, the loss over all of them gives each feature's
    gradient, and a second pass over each micro-batch, with the same random numbers, carries it to the parameters.
    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loss: ClipLoss
    precision: Precision = "fp32"
    clip_grad_norm: float = 0.0  # 0: no limit
    enter: Callable[[str], None] = _nothing
    _updates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self._updates += 1

    def __call__(self, batches: Sequence[MicroBatch]) -> Outcome:
        """Make one step of one or more micro-batches of equal size."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, scale = self._accumulate(batches) if len(batches) > 1 else self._whole(batches[0])
        self.enter("update")
        self.scaler.unscale_(self.optimizer)
        limit = self.clip_grad_norm or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        before = self._updates
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            unwrap_model(self.model).logit_scale.clamp_(0, LARGEST_LOGIT_SCALE)  # type: ignore[operator]
        return Outcome(loss.detach(), _whole_norm(grad_norm), scale.detach(), self._updates == before)

    def _whole(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        image, text, scale = self._features(batch)
        loss = self._loss(image, text, scale)
        self.enter("backward")
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss, scale

    def _accumulate(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        device = batches[0][0].device
        random: list[tuple[Tensor, Tensor | None]] = []
        cached: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.no_grad():
            for batch in batches:
                random.append(_random_state(device))
                cached.append(self._features(batch))
        size = cached[0][0].shape[0]
        image_leaf, text_leaf = (torch.cat([part[i] for part in cached]).requires_grad_() for i in (0, 1))
        scale_leaf = cached[0][2].clone().requires_grad_()
        loss = self._loss(image_leaf, text_leaf, scale_leaf)
        of_image, of_text, of_scale = torch.autograd.grad(loss, (image_leaf, text_leaf, scale_leaf))
        gpus = [device] if device.type == "cuda" else []
        for i, batch in enumerate(batches):
            with torch.random.fork_rng(gpus), synchronised(self.model, i == len(batches) - 1):
                _set_random_state(random[i], device)
                image, text, scale = self._features(batch)
                rows = slice(i * size, i * size + size)
                carried = (image * of_image[rows]).sum() + (text * of_text[rows]).sum()
                carried = carried + scale * of_scale / len(batches)
                self.enter("backward")
                self.scaler.scale(carried).backward()  # type: ignore[no-untyped-call]
        return loss, scale_leaf

    def _features(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Unit features (B, D) and the scale (), at least in float32."""
        self.enter("forward")
        image_B3SS, tokens_BT = batch
        with autocast(self.precision, image_B3SS.device):
            image, text, scale = self.model(image_B3SS, tokens_BT)
        return _unit(image), _unit(text), plain(scale)

    def _loss(self, image_BD: Tensor, text_BD: Tensor, scale: Tensor) -> Tensor:
        self.enter("gather")
        loss: Tensor = self.loss(image_BD, text_BD, scale)
        return loss


def _unit(features_BD: Tensor) -> Tensor:
    return normalize(features_BD.to(torch.promote_types(features_BD.dtype, torch.float32)), dim=-1)


def _whole_norm(norm: Tensor) -> Tensor:
    """The norm over all ranks' shards, where parameters are sharded."""
    full = getattr(norm, "full_tensor", None)
    return norm.detach() if full is None else full().detach()


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """States of torch's generators that dropout draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
