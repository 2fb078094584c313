"""What every data set gives. Legend: B pairs of a batch, S image side in pixels, T tokens of a caption."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from rwkv_clip.errors import InputError
from rwkv_clip.tokenizer import Tokenizer

__all__ = ["NO_LABEL", "Pairs", "Sample", "Split", "class_number"]

Split = Literal["train", "held-out"]
NO_LABEL = -1


def class_number(value: object) -> int:
    """A class as it is written in data: 3, "3", or 3.0 where others are missing.

    Raises:
        InputError: for anything else than a whole number.
    """
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if number.is_integer():
        return int(number)
    raise InputError(f"label {value!r} is no whole number")


class Sample(NamedTuple):
    """One pair, ready for the model."""

    image: Tensor  # (3, S, S) float32, normalised
    tokens: Tensor  # (T,) int64
    label: int  # class of the image, NO_LABEL where the data has none
    pair: int  # which of the data set it is, or stands in for
    broken: tuple[str, ...] = ()  # places of the broken samples that this one stands in for, with what is wrong


class Pairs(Protocol):
    """A data set with random access. The same seed, epoch and index always give the same sample, in any process."""

    tokenizer: Tokenizer
    problems: list[str]  # rows left out from the start: where they are and what is wrong

    def set_epoch(self, epoch: int) -> None:
        """Draw other captions and crops than in other epochs."""
        ...

    def captions(self, index: int) -> list[str]:
        """All captions of an image."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...
