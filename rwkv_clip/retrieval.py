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
from rwkv_clip.data.loading import in_order
from rwkv_clip.data.pairs import Pairs
from rwkv_clip.evaluation import BATCH, evaluating, evaluation_parser, open_held_out, report_broken, reporting
from rwkv_clip.training.distributed import Place, every_rank

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
    place: Place | None = None,
    batch_size: int = BATCH,
    workers: int = 0,
    note: Callable[[list[str]], None] = lambda _: None,
) -> dict[str, float]:
    """Return recall at 1, 5 and 10, in [0, 1], from images to captions and back, under names such as ``text_to_image_r5``.

    Every image counts with all its captions; a caption that several images share belongs to all of them. Images that
    cannot be read are left out with their captions.

    Args:
        model: in the mode its features should be taken in; usually ``eval()``.
        pairs: held-out pairs.
        place: of this process among several that share the work; every one must call it, and gets all scores.
        batch_size: images and captions at a time.
        workers: processes that load the images.
        note: is told before each batch which images of it are left out.
    """
    place = place or Place(next(model.parameters()).device)
    images, captions = list[Tensor](), list[list[str]]()
    for batch in in_order(pairs, batch_size, workers=workers, rank=place.rank, world=place.world):
        note(batch.broken)
        images.append(_unit(model.encode_image(batch.image.to(place.device)))[batch.whole])
        captions += [pairs.captions(pair) for pair in batch.pair[batch.whole].tolist()]
    shares = every_rank((torch.cat(images), captions), place)
    image_nD = torch.cat([images for images, _ in shares]).to(place.device)
    texts, own = dict[str, int](), list[tuple[int, int]]()
    for i, found in enumerate(text for _, captions in shares for text in captions):
        own += [(i, texts.setdefault(text, len(texts))) for text in found]
    text_mD = _text_features(model, pairs, list(texts), batch_size, place, note)
    relation = torch.tensor(own)
    to_text, to_image = recalls(image_nD, text_mD, relation), recalls(text_mD, image_nD, relation.flip(1))
    return {f"image_to_text_r{k}": share for k, share in zip(RANKS, to_text, strict=True)} | {
        f"text_to_image_r{k}": share for k, share in zip(RANKS, to_image, strict=True)
    }


def _unit(features_BD: Tensor) -> Tensor:
    """Rows of length 1, on the CPU, where those of all ranks are put together."""
    return normalize(features_BD.float(), dim=-1).cpu()


def _text_features(
    model: RWKVCLIP, pairs: Pairs, texts: list[str], batch_size: int, place: Place, note: Callable[[list[str]], None]
) -> Tensor:
    """(m, D): each rank computes a share; the last shares are filled up, so that all ranks make as many passes."""
    size = -(-len(texts) // place.world)
    share = [texts[i % len(texts)] for i in range(place.rank * size, place.rank * size + size)]
    features = list[Tensor]()
    for first in range(0, size, batch_size):
        note([])
        tokens = pairs.tokenizer(share[first : first + batch_size], model.config.ctx_len)
        features.append(_unit(model.encode_text(tokens.to(place.device))))
    return torch.cat(every_rank(torch.cat(features), place))[: len(texts)].to(place.device)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 2 with one message on stderr for input that does not fit."""
    args = evaluation_parser("retrieval", "Recall of a checkpoint on image-text pairs, both ways.").parse_args(argv)

    def work() -> int:
        with evaluating(args) as model:
            scores = retrieval_scores(
                model, open_held_out(args, model.config), batch_size=args.batch_size, workers=args.workers,
                note=lambda broken: report_broken(broken, args.on_broken),
            )  # fmt: skip
        for name, share in scores.items():
            print(f"{name.replace('_', ' ')}: {share:.1%}")
        return 0

    return reporting("retrieval", work)


if __name__ == "__main__":
    sys.exit(main())
