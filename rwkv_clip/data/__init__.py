"""Image-text pairs: the digits that come along, manifests of image files, tar shards; batches of them in a set order."""

from __future__ import annotations

from pathlib import Path

from rwkv_clip.config import ModelConfig
from rwkv_clip.data.digits import DigitPairs
from rwkv_clip.data.manifest import MANIFEST_SUFFIXES, ManifestSource
from rwkv_clip.data.pairs import Pairs, Split
from rwkv_clip.data.pictures import PicturePairs, Source
from rwkv_clip.data.shards import ShardSource, find_shards
from rwkv_clip.errors import InputError
from rwkv_clip.tokenizer import BytePairTokenizer, find_vocabulary

__all__ = ["open_pairs"]


def open_pairs(
    name: str | Path,
    config: ModelConfig,
    split: Split = "train",
    *,
    seed: int = 0,
    limit: int | None = None,
    vocabulary: Path | None = None,
    image_column: str = "image",
    caption_columns: tuple[str, ...] = (),
    augment: bool = True,
) -> Pairs:
    """Open a data set; its ``problems`` say which of its rows are broken and left out.

    Args:
        name: ``digits``, a manifest (.csv, .parquet), a tar shard, a directory of them, or a pattern such as
            ``pairs-*.tar``.
        config: of the model that is to read the pairs.
        split: ``held-out`` images are never augmented, and their caption is always the first.
        seed: of captions and augmentation.
        limit: keep the first pairs only.
        vocabulary: file of CLIP's byte-pair merges, for all but the digits; by default that of an installed package.
        image_column, caption_columns: of a manifest; by default every column whose name begins with ``caption``.
        augment: crop and mirror the training images at random.

    Raises:
        InputError: for a name that is nothing of these, data that cannot be read, or a model that does not fit it.
    """
    if str(name) == "digits":
        return DigitPairs(config, split, seed=seed, limit=limit)
    source = _open_source(str(name), image_column, caption_columns, limit)
    tokenizer = BytePairTokenizer(find_vocabulary() if vocabulary is None else vocabulary)
    if config.vocab_size < tokenizer.vocab_size:
        raise InputError(f"vocab_size {config.vocab_size}: {name} needs at least {tokenizer.vocab_size}")
    return PicturePairs(source, tokenizer, config, split, seed=seed, augment=augment)


def _open_source(name: str, image_column: str, caption_columns: tuple[str, ...], limit: int | None) -> Source:
    if Path(name).suffix in MANIFEST_SUFFIXES:
        return ManifestSource(Path(name), image_column, caption_columns, limit=limit)
    shards = find_shards(name)
    if not shards:
        raise InputError(
            f"no data {name!r}: expected digits, a manifest ({', '.join(MANIFEST_SUFFIXES)}), or tar shards "
            "(a file, a directory of them, a pattern)"
        )
    return ShardSource(shards, limit=limit)
