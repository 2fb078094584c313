"""From captions to token ids: a word list for closed vocabularies, and CLIP's byte-pair encoding.

Legend: B captions, T tokens of a caption, padding included.
"""

from __future__ import annotations

import gzip
import html
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rwkv_clip.errors import InputError

__all__ = ["BytePairTokenizer", "Tokenizer", "WordTokenizer", "find_vocabulary"]

PAD = 0
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
PACKAGES_WITH_VOCABULARY = ("clip", "open_clip")


def find_vocabulary() -> Path:
    """Return the file of CLIP's byte-pair merges that an installed package ships; the package is not imported.

    Raises:
        InputError: when none is installed.
    """
    for package in PACKAGES_WITH_VOCABULARY:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / VOCABULARY
            if path.is_file():
                return path
    raise InputError(
        f"no byte-pair vocabulary: give a path to {VOCABULARY} (--vocabulary), or pip install a package that has it, "
        "open-clip-torch or openai-clip"
    )


class Tokenizer(Protocol):
    """What turns captions into the text tower's input."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        ...

    def __call__(self, texts: str | Sequence[str], context_length: int) -> Tensor:
        """Return int64 ids (B, T = context_length), 0 where a caption has ended; too long captions are cut."""
        ...


def _pad(rows: Sequence[Sequence[int]], context_length: int) -> Tensor:
    """(B, T) int64 from rows of ids that end with the end token; a row cut short still ends with it."""
    ids = torch.full((len(rows), context_length), PAD, dtype=torch.int64)
    for i, row in enumerate(rows):
        cut = list(row) if len(row) <= context_length else [*row[: context_length - 1], row[-1]]
        ids[i, : len(cut)] = torch.tensor(cut)
    return ids


class WordTokenizer:
    """One id for each known word, in the order given: 0 padding, 1 start, 2 end, words from 3.

    Raises:
        InputError: when called with a word that is not in the list.
    """

    START, END, FIRST = 1, 2, 3

    def __init__(self, words: Iterable[str]) -> None:
        self._ids = {word: self.FIRST + i for i, word in enumerate(dict.fromkeys(words))}

    @property
    def vocab_size(self) -> int:
        """Number of ids, the three special ones included."""
        return self.FIRST + len(self._ids)

    def __call__(self, texts: str | Sequence[str], context_length: int) -> Tensor:
        """Return int64 ids (B, T = context_length); words are split at spaces, in lower case."""
        rows = [self._encode(text) for text in ([texts] if isinstance(texts, str) else texts)]
        return _pad(rows, context_length)

    def _encode(self, text: str) -> list[int]:
        words = text.lower().split()
        unknown = [word for word in words if word not in self._ids]
        if unknown:
            raise InputError(f"caption {text!r}: unknown word {unknown[0]!r}; known: {', '.join(self._ids)}")
        return [self.START, *(self._ids[word] for word in words), self.END]


class BytePairTokenizer:
    """CLIP's byte-pair encoding, with the merges read from its vocabulary file (``bpe_simple_vocab_16e6.txt.gz``).

    Text is repaired, unescaped from HTML twice, runs of white space become one space, and letters are lowered. Source:
    Radford et al., "CLIP" (2021), section 2.4; Sennrich et al., "Subword Units" (2016).

    Args:
        vocabulary: the file, gzipped or not.
        repair: what to do to a text first. The published models were trained with ``ftfy.fix_text``, which undoes
            wrongly decoded characters and straightens quotes; pass it for the very same ids on such texts.

    Raises:
        InputError: when the file is missing or is not a list of merges.
    """

    VOCAB_SIZE = 49408
    MERGES = VOCAB_SIZE - 2 - 2 * 256
    SPECIAL = ("<start_of_text>", "<end_of_text>")

    def __init__(self, vocabulary: str | Path, repair: Callable[[str], str] = str) -> None:
        self._repair = repair
        merges = _read_merges(Path(vocabulary), self.MERGES)
        self._letters = _byte_letters()
        singles = list(self._letters.values())
        tokens = [*singles, *(s + WORD_END for s in singles), *(a + b for a, b in merges), *self.SPECIAL]
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._split = lru_cache(maxsize=1 << 16)(self._merge)

    @property
    def vocab_size(self) -> int:
        """Number of ids, 49408."""
        return self.VOCAB_SIZE

    def __call__(self, texts: str | Sequence[str], context_length: int = 77) -> Tensor:
        """Return int64 ids (B, T = context_length): start 49406, the caption, end 49407, then padding 0."""
        start, end = (self._ids[token] for token in self.SPECIAL)
        rows = [[start, *self._encode(text), end] for text in ([texts] if isinstance(texts, str) else texts)]
        return _pad(rows, context_length)

    def _encode(self, text: str) -> Iterator[int]:
        clean = " ".join(html.unescape(html.unescape(self._repair(text))).split()).lower()
        for piece in _pieces(clean, self.SPECIAL):
            if piece in self.SPECIAL:
                yield self._ids[piece]
            else:
                letters = "".join(self._letters[byte] for byte in piece.encode())
                yield from (self._ids[token] for token in self._split(letters))

    def _merge(self, letters: str) -> tuple[str, ...]:
        """Join the pair of symbols that was merged first in training, until no known pair is left."""
        symbols = [*letters[:-1], letters[-1] + WORD_END]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, self.MERGES))
            if best not in self._ranks:
                break
            symbols = _join_all(symbols, best)
        return tuple(symbols)


WORD_END = "</w>"
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def _join_all(symbols: Sequence[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    i = 0
    while i < len(symbols):
        if tuple(symbols[i : i + 2]) == pair:
            joined.append(pair[0] + pair[1])
            i += 2
        else:
            joined.append(symbols[i])
            i += 1
    return joined


def _read_merges(path: Path, count: int) -> list[tuple[str, str]]:
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().split("\n")[1 : count + 1]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the vocabulary {path}: {error}") from error
    merges = [tuple(line.split()) for line in lines]
    if len(merges) < count or any(len(pair) != 2 for pair in merges):
        raise InputError(f"vocabulary {path}: expected a heading and {count} lines of two symbols; seen {len(merges)}")
    return merges  # type: ignore[return-value]


def _byte_letters() -> dict[int, str]:
    """A printable letter for each byte: itself where it is printable in Latin-1, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def _pieces(text: str, special: Sequence[str]) -> Iterator[str]:
    """Split into special tokens, English contractions, runs of letters, single numerals, and runs of anything else."""
    i = 0
    while i < len(text):
        whole = next((token for token in (*special, *CONTRACTIONS) if text.startswith(token, i)), None)
        if whole is not None:
            end = i + len(whole)
        else:
            kind, end = _kind(text[i]), i + 1
            while kind != "N" and end < len(text) and _kind(text[end]) == kind:
                if kind == "other" and text.startswith(tuple(special), end):
                    break
                end += 1
        if not text[i].isspace():
            yield text[i:end]
        i = end


def _kind(character: str) -> str:
    """``L`` letter, ``N`` numeral, ``space`` or ``other``, after Unicode's general categories."""
    if character.isspace():
        return "space"
    category = unicodedata.category(character)[0]
    return category if category in "LN" else "other"
