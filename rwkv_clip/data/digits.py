"""The embedded data set: scikit-learn's handwritten digits with captions made from templates.

Legend: S image side in pixels, T tokens of a caption, n images.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from einops import repeat
from torch import Tensor
from torch.utils.data import Dataset

from rwkv_clip.config import ModelConfig
from rwkv_clip.data.pairs import Sample, Split
from rwkv_clip.errors import InputError
from rwkv_clip.tokenizer import Tokenizer, WordTokenizer

__all__ = ["CAPTION_TEMPLATES", "DIGIT_NAMES", "DigitPairs", "digit_tokenizer"]

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTION_TEMPLATES = (
    "a handwritten {}",
    "the digit {}",
    "a photo of the number {}",
    "a small grey picture of a {}",
    "somebody wrote a {} by hand",
    "this is the number {}",
)
HELD_OUT_SHARE = 0.2
SPLIT_SEED = 1797  # which digits are held out never depends on the training seed
BRIGHTEST = 16.0


def digit_tokenizer() -> WordTokenizer:
    """The word list of all digit captions."""
    captions = (template.format(name) for template in CAPTION_TEMPLATES for name in DIGIT_NAMES)
    return WordTokenizer(word for caption in captions for word in caption.split())


class DigitPairs(Dataset[Sample]):
    """The 1797 real 8x8 digits of ``sklearn.datasets.load_digits``, a fifth of them held out, each with a caption.

    Items are (image (3, S, S) float32 with mean about 0 and deviation about 1, tokens (T,) int64, digit 0..9), where
    S and T are the model's. The caption's template is drawn anew for every epoch from (seed, epoch, index), so the
    same seed always gives the same captions, in any order of access. Which digits are held out is fixed.

    Raises:
        InputError: when the model's vocabulary or context is too small for the captions, or scikit-learn is missing.
    """

    def __init__(self, config: ModelConfig, split: Split = "train", *, seed: int = 0, limit: int | None = None) -> None:
        self.tokenizer: Tokenizer = digit_tokenizer()
        if config.vocab_size < self.tokenizer.vocab_size:
            raise InputError(f"vocab_size {config.vocab_size}: digits needs at least {self.tokenizer.vocab_size}")
        images_nhw, labels = _load_digits()
        order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
        held_out = round(HELD_OUT_SHARE * len(labels))
        chosen = (order[held_out:] if split == "train" else order[:held_out])[:limit]
        self.images = _prepare(images_nhw[chosen], config.input_size)
        self.labels = [int(label) for label in labels[chosen]]
        self.tokens = torch.stack(
            [
                self.tokenizer([template.format(name) for name in DIGIT_NAMES], config.ctx_len)
                for template in CAPTION_TEMPLATES
            ]
        )
        self.problems: list[str] = []
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw other captions than in other epochs."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.labels)

    def captions(self, index: int) -> list[str]:
        """Every template filled with the digit's name."""
        return [template.format(DIGIT_NAMES[self.labels[index]]) for template in CAPTION_TEMPLATES]

    def __getitem__(self, index: int) -> Sample:
        label = self.labels[index]
        template = random.Random(f"{self.seed}/{self.epoch}/{index}").randrange(len(CAPTION_TEMPLATES))
        return Sample(self.images[index], self.tokens[template, label], label, index)


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("the digits come with scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    return bunch.images, bunch.target


def _prepare(images_nhw: np.ndarray, side: int) -> Tensor:
    """(n, 8, 8) in 0..16 to (n, 3, S, S) float32, resized bilinearly, mean 0 and deviation 1 over the whole set."""
    grey = torch.from_numpy(images_nhw).to(torch.float32)[:, None] / BRIGHTEST
    resized = torch.nn.functional.interpolate(grey, (side, side), mode="bilinear", align_corners=False)
    mean, deviation = 0.3053, 0.3760  # of all 1797 digits, before resizing
    return repeat((resized - mean) / deviation, "n 1 y x -> n c y x", c=3).contiguous()
