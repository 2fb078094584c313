"""Tar shards of pairs."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from rwkv_clip import InputError
from rwkv_clip.data.shards import ShardSource, find_shards


def write(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_members_of_one_name_are_a_pair(pictures):
    """Image, caption and class of one key belong together, whatever lies between them."""
    source = ShardSource([pictures / "pairs-000.tar"])
    assert len(source) == 24
    record = source.read(7)
    assert record.image == (pictures / "007.png").read_bytes()
    assert (record.captions, record.label) == (["picture 7 of the digit seven"], 7)
    assert source.place(7) == f"{pictures / 'pairs-000.tar'} member 007"


def test_json_holds_one_or_several_captions(tmp_path):
    """A .json member gives caption or captions, in other folders and with other suffixes too; a class is optional."""
    one, many = (
        json.dumps({"caption": "one"}).encode(),
        json.dumps({"captions": ["two", " ", "three"], "url": 1}).encode(),
    )
    members = {"x/a.JPG": b"1", "x/a.json": one, "y/a.webp": b"2", "y/a.json": many, "y/a.info.txt": b"no caption"}
    source = ShardSource([write(tmp_path / "s.tar", members)])
    assert [(source.read(i).image, source.captions(i)) for i in range(2)] == [(b"1", ["one"]), (b"2", ["two", "three"])]
    assert source.read(0).label == -1


def test_pairs_of_all_shards_are_in_order(tmp_path):
    """A directory or a pattern stands for its tar files in the order of their names; a limit keeps the first pairs."""
    for shard in (1, 0, 2):
        write(tmp_path / f"s-{shard}.tar", {f"{shard}.png": b"i", f"{shard}.txt": str(shard).encode()})
    (tmp_path / "notes.txt").touch()
    for name in (str(tmp_path), str(tmp_path / "s-*.tar")):
        source = ShardSource(find_shards(name))
        assert [source.captions(i) for i in range(3)] == [["0"], ["1"], ["2"]]
    assert len(ShardSource(find_shards(str(tmp_path)), limit=2)) == 2


def test_halves_of_pairs_are_listed(tmp_path):
    """An image without caption, and a caption without image, are left out and listed."""
    path = write(tmp_path / "s.tar", {"a.png": b"i", "b.txt": b"t", "c.png": b"i", "c.txt": b"t"})
    source = ShardSource([path])
    assert len(source) == 1
    assert source.problems == [f"{path} member a: no caption", f"{path} member b: no image"]


def test_a_cut_shard_gives_what_is_whole(tmp_path):
    """Of a shard that ends too early the whole pairs are used, and the damage is listed."""
    path = write(tmp_path / "s.tar", {f"{i}.{suffix}": b"x" * 2000 for i in range(9) for suffix in ("png", "txt")})
    path.write_bytes(path.read_bytes()[:20000])
    source = ShardSource([path])
    assert 0 < len(source) < 9
    assert any("damaged, its rest is left out" in problem for problem in source.problems)
    assert all(source.read(i).image == b"x" * 2000 for i in range(len(source)))


def test_captions_that_cannot_be_read_are_explained(tmp_path):
    """Bad JSON, bad UTF-8 and empty texts are errors when the pair is read."""
    members = {"a.png": b"i", "a.json": b"{", "b.png": b"i", "b.txt": b"\xff", "c.png": b"i", "c.txt": b" "}
    source = ShardSource([write(tmp_path / "s.tar", members)])
    for i in range(3):
        with pytest.raises(InputError, match="caption"):
            source.read(i)


def test_shards_of_no_use_are_explained(tmp_path):
    """A compressed file, a file that is no tar, and a shard without a pair are errors that name the file."""
    write(tmp_path / "packed.tar", {"a.png": b"i", "a.txt": b"t"}, "w:gz")
    (tmp_path / "text.tar").write_text("no tar at all")
    write(tmp_path / "empty.tar", {"a.md": b"i"})
    for name, message in (
        ("packed", "uncompressed"),
        ("text", "cannot read the shard"),
        ("empty", "holds no image with a"),
    ):
        with pytest.raises(InputError, match=rf"{name}\.tar.*{message}|{message}.*{name}\.tar"):
            ShardSource([tmp_path / f"{name}.tar"])
