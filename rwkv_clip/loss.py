"""CLIP's contrastive loss, over one process or many. Legend: B batch of a rank, G of all ranks, D channels."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from rwkv_clip.errors import InputError

__all__ = ["ClipLoss"]


class ClipLoss(nn.Module):
    """Symmetric cross-entropy: each image should pick its own caption out of the batch, each caption its own image.

    With a process group the batch is that of all ranks. Whatever the flags, the mean over the ranks of the gradients
    (what DistributedDataParallel and fully_shard make of them) is the gradient of a single process's loss on the whole
    batch, and the mean of the returned losses is its loss. Source: Radford et al., "CLIP" (2021), figure 3.

    Args:
        local_loss: compute a rank's own B rows against all G only: B·G similarities a rank instead of G·G. The
            returned loss is then the rank's own.
        gather_with_grad: send gradients back to the ranks whose features were used. Without it a rank multiplies its
            own features' gradient by the number of ranks, which is the same number without the exchange, as every
            rank computes the same loss. ``local_loss`` needs it.
        group: the processes; the default group by default, and a single process where none is initialised.

    Raises:
        InputError: for ``local_loss`` without ``gather_with_grad``: the gradients would be wrong.
    """

    def __init__(
        self, *, local_loss: bool = False, gather_with_grad: bool = False, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        if local_loss and not gather_with_grad:
            raise InputError(
                "local_loss needs gather_with_grad: a rank's own rows say nothing of its features' use in others'"
            )
        self.local_loss, self.gather_with_grad, self.group = local_loss, gather_with_grad, group

    def forward(self, image_BD: Tensor, text_BD: Tensor, logit_scale: Tensor) -> Tensor:
        """Return the mean loss, (), in nats.

        Args:
            image_BD, text_BD: (B, D) features of unit length; row i of both belong together. B is equal on all ranks.
            logit_scale: () factor on the cosine similarities, already exponentiated.
        """
        if not _many(self.group):
            logits_BB = logit_scale * image_BD @ text_BD.T
            return _symmetric(logits_BB, logits_BB.T, first=0)
        image_GD, text_GD = (_gather(x, self.group, self.gather_with_grad) for x in (image_BD, text_BD))
        if self.local_loss:
            first = dist.get_rank(self.group) * image_BD.shape[0]
            logits_BG, captions_BG = logit_scale * image_BD @ text_GD.T, logit_scale * text_BD @ image_GD.T
            return _symmetric(logits_BG, captions_BG, first=first)
        logits_GG = logit_scale * image_GD @ text_GD.T
        return _symmetric(logits_GG, logits_GG.T, first=0)


def _many(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _symmetric(images: Tensor, captions: Tensor, *, first: int) -> Tensor:
    """Mean cross-entropy of both directions; the right answer of row i is column ``first + i``."""
    own = torch.arange(first, first + images.shape[0], device=images.device)
    return (cross_entropy(images, own) + cross_entropy(captions, own)) / 2


def _gather(x_BD: Tensor, group: dist.ProcessGroup | None, with_grad: bool) -> Tensor:
    """All ranks' rows, (G, D), in the order of ranks."""
    return cast(Tensor, _Gather.apply(x_BD, group, with_grad))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Concatenate every rank's rows. Backward, a rank's rows get the sum of what all ranks' losses say of them."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, group: dist.ProcessGroup | None, with_grad: bool) -> Tensor:
        ctx.group, ctx.with_grad = group, with_grad
        world = dist.get_world_size(group)
        gathered = x_BD.new_empty(world * x_BD.shape[0], *x_BD.shape[1:])
        dist.all_gather(list(gathered.chunk(world)), x_BD.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_GD: Tensor) -> tuple[Tensor, None, None]:
        world, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        if not ctx.with_grad:
            return gradient_GD.chunk(world)[rank] * world, None, None
        summed = gradient_GD.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed.chunk(world)[rank], None, None
