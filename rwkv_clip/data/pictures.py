"""Pairs from encoded images: decoding, cropping, mirroring, and what happens to images that cannot be decoded.

Legend: S image side in pixels, T tokens of a caption.
"""

from __future__ import annotations

import io
import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
from einops import rearrange
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from rwkv_clip.config import ModelConfig
from rwkv_clip.data.pairs import Sample, Split
from rwkv_clip.errors import InputError
from rwkv_clip.tokenizer import Tokenizer

__all__ = ["PicturePairs", "Record", "Source", "evaluation_view", "training_view"]

# Of the images that CLIP was trained on; published models expect them. Radford et al., "CLIP" (2021), its code.
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CROP_AREA, CROP_ASPECT = (0.7, 1.0), (0.8, 1.25)  # as RWKV-CLIP was trained
MIRROR = 0.5
MOST_BROKEN_IN_A_ROW = 64
DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError, InputError)


class Record(NamedTuple):
    """One pair as it is stored."""

    image: bytes  # encoded: JPEG, PNG, whatever Pillow reads
    captions: list[str]  # at least one
    label: int


class Source(Protocol):
    """Where encoded pairs come from."""

    problems: list[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> Record:
        """Read a pair; raises OSError or InputError when it cannot be read."""
        ...

    def place(self, index: int) -> str:
        """Where a pair lies, in words that lead a person to it."""
        ...

    def captions(self, index: int) -> list[str]:
        """The captions alone."""
        ...


class PicturePairs(Dataset[Sample]):
    """Samples of a source. What is random follows from (seed, epoch, index), so no two workers repeat each other.

    A broken image's place is taken by the next one that is whole, and the sample that stands in says so.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        config: ModelConfig,
        split: Split = "train",
        *,
        seed: int = 0,
        augment: bool = True,
    ) -> None:
        self.source, self.tokenizer, self.problems = source, tokenizer, source.problems
        self.side, self.context = config.input_size, config.ctx_len
        self.training, self.augment = split == "train", augment and split == "train"
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw other captions and crops than in other epochs."""
        self.epoch = epoch

    def captions(self, index: int) -> list[str]:
        """All captions of an image."""
        return self.source.captions(index)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        """Return the sample.

        Raises:
            InputError: when it and the 63 after it are all broken.
        """
        broken: list[str] = []
        for offset in range(min(MOST_BROKEN_IN_A_ROW, len(self))):
            place = (index + offset) % len(self)
            try:
                return self._sample(place)._replace(pair=index, broken=tuple(broken))
            except DECODING_ERRORS as error:
                broken.append(f"{self.source.place(place)}: {error}")
        raise InputError(f"{len(broken)} samples in a row are broken, the first: {broken[0]}")

    def _sample(self, index: int) -> Sample:
        record = self.source.read(index)
        random = np.random.default_rng((self.seed, self.epoch, index))
        image = _decoded(record.image)
        view = training_view(image, self.side, random) if self.augment else evaluation_view(image, self.side)
        caption = record.captions[int(random.integers(len(record.captions))) if self.training else 0]
        return Sample(view, self.tokenizer(caption, self.context)[0], record.label, index)


def _decoded(encoded: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(encoded)).convert("RGB")
    except UnidentifiedImageError as error:  # its words name an address in memory
        raise InputError(f"no image of a known kind, {len(encoded)} bytes") from error


def training_view(image: Image.Image, side: int, random: np.random.Generator) -> Tensor:
    """A random crop, mirrored half the time, resized bilinearly: (3, S, S) float32, normalised.

    The crop has 70 to 100 % of the area and sides in a ratio of 0.8 to 1.25, as far as the image allows.
    """
    area = image.width * image.height * random.uniform(*CROP_AREA)
    aspect = math.exp(random.uniform(*np.log(CROP_ASPECT)))
    width, height = min(image.width, math.sqrt(area * aspect)), min(image.height, math.sqrt(area / aspect))
    left, top = random.uniform(0, image.width - width), random.uniform(0, image.height - height)
    resized = image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    if random.random() < MIRROR:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _normalised(resized)


def evaluation_view(image: Image.Image, side: int) -> Tensor:
    """The largest square around the centre, resized bicubically: (3, S, S) float32, normalised."""
    square = min(image.width, image.height)
    left, top = (image.width - square) / 2, (image.height - square) / 2
    box = (left, top, left + square, top + square)
    return _normalised(image.resize((side, side), Image.Resampling.BICUBIC, box=box))


def _normalised(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
    return rearrange((pixels - torch.tensor(MEAN)) / torch.tensor(DEVIATION), "y x c -> c y x").contiguous()
