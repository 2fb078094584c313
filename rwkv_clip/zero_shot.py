"""Zero-shot classification: the class whose captions are nearest to the image.

Legend: B images, K classes, D channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from einops import rearrange, reduce
from torch import Tensor
from torch.nn.functional import normalize

from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.tokenizer import Tokenizer

__all__ = ["class_embeddings", "zero_shot_accuracy", "zero_shot_logits"]


@torch.no_grad()
def class_embeddings(model: RWKVCLIP, tokenizer: Tokenizer, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Return one unit vector for each class, (K, D) float32: the mean of its captions' unit text features.

    Args:
        model: in the mode its features should be taken in; usually ``eval()``.
        tokenizer: as in training.
        names: the K classes.
        templates: captions with one ``{}`` for the name.

    Source: Radford et al., "CLIP" (2021), section 3.1.4 (ensembling over prompts in embedding space).
    """
    captions = [template.format(name) for name in names for template in templates]
    tokens = tokenizer(captions, model.config.ctx_len).to(next(model.parameters()).device)
    features = normalize(model.encode_text(tokens).float(), dim=-1)
    per_class = rearrange(features, "(k template) d -> k template d", k=len(names))
    return normalize(reduce(per_class, "k template d -> k d", "mean"), dim=-1)


def zero_shot_logits(image_BD: Tensor, classes_KD: Tensor) -> Tensor:
    """Return 100 times the cosine of every image with every class, (B, K), float32 (never rounded to integers)."""
    return 100 * normalize(image_BD.float(), dim=-1) @ classes_KD.float().T


@torch.no_grad()
def zero_shot_accuracy(model: RWKVCLIP, classes_KD: Tensor, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the share of images, in [0, 1], whose nearest class is their own; nan without images.

    Args:
        model: in the mode its features should be taken in; usually ``eval()``.
        classes_KD: from :func:`class_embeddings`.
        batches: pairs of images (B, 3, S, S) and class indices (B,).
    """
    right = seen = 0
    for image_B3SS, label_B in batches:
        predicted = zero_shot_logits(model.encode_image(image_B3SS), classes_KD).argmax(-1)
        right += int((predicted == label_B.to(predicted.device)).sum())
        seen += len(label_B)
    return right / seen if seen else float("nan")
