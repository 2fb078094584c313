"""Token ids of captions."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rwkv_clip import InputError
from rwkv_clip.tokenizer import BytePairTokenizer, WordTokenizer


def test_words_get_ids_in_order():
    """Words are numbered from 3 in the order of the list, framed by start and end, padded with zeros."""
    tokenizer = WordTokenizer(["the", "digit", "the", "two"])
    assert tokenizer.vocab_size == 6
    assert tokenizer("The two digit", 7).tolist() == [[1, 3, 5, 4, 2, 0, 0]]


def test_long_captions_are_cut_before_the_end_token():
    """A caption that does not fit loses its last words and keeps its end token."""
    ids = WordTokenizer(["a", "b"])(["a b a b a b", "a"], 4)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[1, 3, 4, 2], [1, 3, 2, 0]]


def test_unknown_words_are_named():
    """A word that is not in the list is an error that names it."""
    with pytest.raises(InputError, match="caption 'a cat': unknown word 'cat'; known: a"):
        WordTokenizer(["a"])("a cat", 5)


@pytest.fixture(scope="module")
def vocabulary() -> Path:
    """CLIP's vocabulary, out of a package that ships it."""
    found = find_spec("clip")
    folders = (found.submodule_search_locations if found else None) or []
    files = [path for folder in folders if (path := Path(folder) / "bpe_simple_vocab_16e6.txt.gz").is_file()]
    return files[0] if files else pytest.skip("no package with CLIP's vocabulary is installed")


def test_byte_pairs_are_clips(numbers, vocabulary):
    """Ids equal CLIP's for letters of many scripts, numerals, contractions, emoji, HTML, special tokens and cuts."""
    recorded = numbers("tokens.json")
    texts = {case["text"]: case["ids"] for case in recorded["cases"] if "â€" not in case["text"]}
    assert len(texts) == len(recorded["cases"]) - 1
    ids = BytePairTokenizer(vocabulary)(list(texts), recorded["context_length"])
    for text, row in zip(texts, ids.tolist(), strict=True):
        assert row == texts[text], text


def test_byte_pairs_of_repaired_text_are_clips(numbers, vocabulary):
    """With ftfy's repair the ids equal CLIP's also for wrongly decoded characters."""
    ftfy = pytest.importorskip("ftfy")
    recorded = numbers("tokens.json")
    tokenizer = BytePairTokenizer(vocabulary, repair=ftfy.fix_text)
    for case in recorded["cases"]:
        assert tokenizer(case["text"]).tolist() == [case["ids"]], case["text"]


def test_a_vocabulary_file_may_be_plain(vocabulary, tmp_path):
    """The vocabulary is read gzipped or not."""
    plain = tmp_path / "vocabulary.txt"
    plain.write_bytes(gzip.decompress(vocabulary.read_bytes()))
    assert torch.equal(BytePairTokenizer(plain)("a cat"), BytePairTokenizer(vocabulary)("a cat"))


def test_vocabularies_that_are_none_are_refused(tmp_path):
    """A missing file and one that holds no merges are errors that name the file."""
    with pytest.raises(InputError, match="cannot read the vocabulary"):
        BytePairTokenizer(tmp_path / "nothing.gz")
    short = tmp_path / "short.txt"
    short.write_text("heading\na b\n")
    with pytest.raises(InputError, match="expected a heading and 48894 lines of two symbols; seen 2"):
        BytePairTokenizer(short)
