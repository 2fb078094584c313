"""Tar shards of pairs."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from rwkv_clip import InputError
from rwkv_clip.data.shard_index import index_path, index_shard
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


@pytest.fixture
def shard(tmp_path):
    """A shard of three pairs and two halves of pairs."""
    members = {"a.png": b"i", "a.txt": b"one", "b.png": b"j", "b.json": b'{"caption": "two"}', "b.cls": b"5"}
    return write(tmp_path / "s.tar", members | {"c.png": b"k", "c.txt": b"three", "d.png": b"", "e.txt": b"half"})


def contents(source: ShardSource) -> list[object]:
    return [
        *(source.read(i) for i in range(len(source))),
        *(source.place(i) for i in range(len(source))),
        *source.problems,
    ]


def no_headers(*_, **__):
    raise AssertionError("the shard's headers are read")


def test_headers_are_read_once(shard, monkeypatch):
    """The second opening takes the index kept beside the shard, with all that the first found, and reads no header."""
    first = contents(ShardSource([shard]))
    assert len(first) == 8
    monkeypatch.setattr("tarfile.open", no_headers)
    assert contents(ShardSource([shard])) == first
    assert find_shards(str(shard.parent)) == [shard]


def test_an_index_moves_with_its_shard(shard, tmp_path, monkeypatch):
    """Moved to another directory with its index, the shard is not read anew, and its problems are at its new place."""
    ShardSource([shard])
    (tmp_path / "new").mkdir()
    for path in (shard, index_path(shard)):
        path.rename(tmp_path / "new" / path.name)
    monkeypatch.setattr("tarfile.open", no_headers)
    moved = ShardSource([tmp_path / "new" / "s.tar"])
    assert moved.problems[0] == f"{tmp_path / 'new' / 's.tar'} member d: no caption"


@pytest.mark.parametrize("damage", ["written anew", "cut", "emptied", "of another kind"])
def test_an_index_that_does_not_fit_is_made_anew(shard, damage):
    """When the shard has changed since, or its index is damaged, the index is made anew and kept."""
    kept = index_path(shard)
    if damage == "written anew":
        ShardSource([write(shard, {"a.png": b"i", "a.txt": b"one"})])
        write(shard, {"a.png": b"i", "a.txt": b"one", "b.png": b"j", "b.txt": b"two", "c.png": b"k", "c.txt": b"three"})
    else:
        ShardSource([shard])
        whole = kept.read_bytes()
        kept.write_bytes({"cut": whole[:-50], "emptied": b"", "of another kind": b"x" * 500}[damage])
    assert [ShardSource([shard]).captions(i) for i in range(3)] == [["one"], ["two"], ["three"]]
    assert index_shard(shard)[1].key == "b"


def test_where_nothing_can_be_written_it_works_as_well(shard, monkeypatch):
    """In a read-only place the index is not kept, and the pairs are the same."""

    def refuse(path, write):
        raise PermissionError(path)

    monkeypatch.setattr("rwkv_clip.data.shard_index.write_atomically", refuse)
    first = contents(ShardSource([shard]))
    assert not index_path(shard).exists()
    monkeypatch.undo()
    assert contents(ShardSource([shard])) == first


def test_a_kept_index_takes_no_memory_of_its_own(tmp_path):
    """Opening a kept index maps its file, which all processes share, and copies nothing."""
    path = write(tmp_path / "s.tar", {f"{i:05}.{suffix}": b"x" for i in range(2000) for suffix in ("png", "txt")})
    ShardSource([path])
    before = pa.total_allocated_bytes()
    source = ShardSource([path])
    assert pa.total_allocated_bytes() - before < 2000
    assert source.captions(1999) == ["x"]
