"""Zero-shot classification: the class whose captions are nearest to the image.

``python -m rwkv_clip.zero_shot CHECKPOINT --data images.csv --classes classes.json``.
Legend: B images, K classes, D channels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from einops import rearrange, reduce
from torch import Tensor
from torch.nn.functional import normalize

from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.data.digits import CAPTION_TEMPLATES, DIGIT_NAMES
from rwkv_clip.data.loading import Batch, in_order
from rwkv_clip.data.pairs import NO_LABEL
from rwkv_clip.errors import InputError
from rwkv_clip.evaluation import evaluating, evaluation_parser, open_held_out, report_broken, reporting
from rwkv_clip.tokenizer import Tokenizer
from rwkv_clip.training.distributed import Place, every_rank

__all__ = ["class_embeddings", "main", "zero_shot_accuracy", "zero_shot_logits"]


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
def zero_shot_accuracy(
    model: RWKVCLIP, classes_KD: Tensor, batches: Iterable[Batch], *, place: Place | None = None
) -> float:
    """Return the share of images, in [0, 1], whose nearest class is their own; nan without images.

    Args:
        model: in the mode its features should be taken in; usually ``eval()``.
        classes_KD: from :func:`class_embeddings`.
        batches: their labels are classes; what is not whole does not count.
        place: of this process among several that each have a share of the images; every one must call it.
    """
    right = seen = 0
    for batch in batches:
        predicted = zero_shot_logits(model.encode_image(batch.image.to(classes_KD.device)), classes_KD).argmax(-1).cpu()
        right += int(((predicted == batch.label) & batch.whole).sum())
        seen += int(batch.whole.sum())
    counts = [(right, seen)] if place is None else every_rank((right, seen), place)
    right, seen = (sum(column) for column in zip(*counts, strict=True))
    return right / seen if seen else float("nan")


class _Classes(NamedTuple):
    names: Sequence[str]
    templates: Sequence[str]


def _read_classes(path: Path | None, data: str) -> _Classes:
    if path is None:
        if data != "digits":
            raise InputError("--classes is needed: a JSON file with classes, and templates with {} for the name")
        return _Classes(DIGIT_NAMES, CAPTION_TEMPLATES)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        names, templates = found["classes"], found.get("templates", ["a photo of a {}"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'--classes {path}: expected JSON {{"classes": [...], "templates": [...]}}: {error}'
        ) from error
    if not names or not templates or not all("{}" in template for template in templates):
        raise InputError(f"--classes {path}: needs classes, and templates that each hold {{}} for the name")
    return _Classes(names, templates)


def _labelled(batches: Iterable[Batch], count: int, policy: str) -> Iterator[Batch]:
    """The batches, once it is said what of them is broken, and their labels are known to be classes."""
    for batch in batches:
        report_broken(batch.broken, policy)
        label = batch.label[batch.whole]
        if len(label) and not (int(label.min()) > NO_LABEL and int(label.max()) < count):
            raise InputError(
                f"the data's labels must be 0 to {count - 1}, the classes' places; a column label holds them"
            )
        yield batch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 2 with one message on stderr for input that does not fit."""
    parser = evaluation_parser("zero_shot", "Zero-shot accuracy of a checkpoint on labelled images.")
    parser.add_argument("--classes", type=Path, help="JSON file with classes and templates; the digits have their own")
    args = parser.parse_args(argv)

    def work() -> int:
        names, templates = _read_classes(args.classes, args.data)
        with evaluating(args) as model:
            pairs = open_held_out(args, model.config)
            classes = class_embeddings(model, pairs.tokenizer, names, templates)
            batches = in_order(pairs, args.batch_size, workers=args.workers)
            labelled = _labelled(batches, len(names), args.on_broken)
            accuracy = zero_shot_accuracy(model, classes, labelled)
        print(f"zero-shot accuracy on {len(pairs)} images of {len(names)} classes: {accuracy:.1%}")
        return 0

    return reporting("zero_shot", work)


if __name__ == "__main__":
    sys.exit(main())
