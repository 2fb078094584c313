"""What every data set gives. Legend: B pairs of a batch, S image side in pixels, T tokens of a caption."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from rwkv_clip.tokenizer import Tokenizer

__all__ = ["NO_LABEL", "Pairs", "Sample", "Split"]

Split = Literal["train", "held-out"]
NO_LABEL = -1


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
