"""Retrieval: the captions of an image among all captions, and the images of a caption among all images.

``python -m rwkv_clip.retrieval CHECKPOINT --data pairs.csv``. Legend: n images, m captions, D channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.data.loading import Batch, in_order
from rwkv_clip.data.pairs import Pairs
from rwkv_clip.evaluation import BATCH, evaluating, evaluation_parser, open_held_out, report_broken, reporting

__all__ = ["RANKS", "main", "recalls", "retrieval_scores"]

RANKS = (1, 5, 10)


def recalls(query_nD: Tensor, gallery_mD: Tensor, own: Tensor, ranks: Sequence[int] = RANKS) -> list[float]:
    """Return, for each k of ``ranks``, the share of queries with one of their own among the k most similar.

    Args:
        query_nD, gallery_mD: (n, D) and (m, D) features of unit length.
        own: (any, 2) int64, pairs of a query and one of its own in the gallery; a query may have several.
        ranks: the k, each counted up to the size of the gallery.

    Returns:
        Shares in [0, 1]; nan without queries. Source: Karpathy & Fei-Fei, "Deep Visual-Semantic Alignments" (2015),
        section 4.1.
    """
    if not len(query_nD):
        return [float("nan")] * len(ranks)
    size = len(gallery_mD)
    right = (own[:, 0] * size + own[:, 1]).to(query_nD.device)
    found: list[Tensor] = []
    for first in range(0, len(query_nD), BATCH):  # never all similarities at once
        similarity = query_nD[first : first + BATCH] @ gallery_mD.T
        nearest = similarity.topk(min(max(ranks), size), dim=1).indices
        rows = torch.arange(first, first + len(nearest), device=nearest.device)
        found.append(torch.isin(rows[:, None] * size + nearest, right))
    hits = torch.cat(found)
    return [float(hits[:, :k].any(dim=1).float().mean()) for k in ranks]


@torch.no_grad()
def retrieval_scores(
    model: RWKVCLIP,
    pairs: Pairs,
    *,
    batch_size: int = BATCH,
    workers: int = 0,
    note_broken: Callable[[list[str]], None] = lambda _: None,
) -> dict[str, float]:
    """Return recall at 1, 5 and 10, in [0, 1], from images to captions and back, under names such as ``text_to_image_r5``.

    Every image counts with all its captions; a caption that several images share belongs to all of them. Images that
    cannot be read are left out with their captions.

    Args:
        model: in the mode its features should be taken in; usually ``eval()``.
        pairs: held-out pairs.
        batch_size: images and captions at a time.
        workers: processes that load the images.
        note_broken: is told which images are left out.
    """
    images, texts, own = list[Tensor](), dict[str, int](), list[tuple[int, int]]()
    seen = count = 0
    for batch in in_order(pairs, batch_size, workers=workers):
        note_broken(batch.broken)
        images.append(_image_features(model, batch))
        for whole in batch.whole.tolist():
            if whole:
                own += [(count, texts.setdefault(text, len(texts))) for text in pairs.captions(seen)]
                count += 1
            seen += 1
    image_nD, text_mD = torch.cat(images), _text_features(model, pairs, list(texts), batch_size)
    relation = torch.tensor(own)
    to_text, to_image = recalls(image_nD, text_mD, relation), recalls(text_mD, image_nD, relation.flip(1))
    return {f"image_to_text_r{k}": share for k, share in zip(RANKS, to_text, strict=True)} | {
        f"text_to_image_r{k}": share for k, share in zip(RANKS, to_image, strict=True)
    }


def _image_features(model: RWKVCLIP, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    return normalize(model.encode_image(batch.image[batch.whole].to(device)).float(), dim=-1)


def _text_features(model: RWKVCLIP, pairs: Pairs, texts: list[str], batch_size: int) -> Tensor:
    device = next(model.parameters()).device
    chunks = (texts[first : first + batch_size] for first in range(0, len(texts), batch_size))
    features = (model.encode_text(pairs.tokenizer(chunk, model.config.ctx_len).to(device)) for chunk in chunks)
    return torch.cat([normalize(feature.float(), dim=-1) for feature in features])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 2 with one message on stderr for input that does not fit."""
    args = evaluation_parser("retrieval", "Recall of a checkpoint on image-text pairs, both ways.").parse_args(argv)

    def work() -> int:
        with evaluating(args) as model:
            scores = retrieval_scores(
                model, open_held_out(args, model.config), batch_size=args.batch_size, workers=args.workers,
                note_broken=lambda broken: report_broken(broken, args.on_broken),
            )  # fmt: skip
        for name, share in scores.items():
            print(f"{name.replace('_', ' ')}: {share:.1%}")
        return 0

    return reporting("retrieval", work)


if __name__ == "__main__":
    sys.exit(main())
