"""Every format that torch and its neighbours write is read to the bit, without torch and without running anything."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from tracehooks.checkpoint import opened, stored
from tracehooks.checkpoint.opened import open_checkpoint
from tracehooks.core.errors import CheckpointError

LEGACY_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
NEW_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)


def state(dtypes: tuple[torch.dtype, ...]) -> dict[str, Tensor]:
    """Tensors of every dtype and of every way to lie in a storage."""
    torch.manual_seed(0)
    whole = torch.randn(7, 5)
    found = {str(dtype): (torch.randn(3, 4) * 3).to(dtype) for dtype in dtypes}
    return found | {
        "weight": whole, "tied": whole, "transposed": whole.t(), "slice": whole[1:4, 2:], "strided": whole[::2, ::3],
        "expanded": torch.ones(1).expand(4), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.randn(3)), "specials": torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]),
    }  # fmt: skip


def values(tensor: Tensor) -> np.ndarray[Any, Any]:
    """As a checkpoint's `read` gives them."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).numpy()
    narrow = tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    return (tensor.float() if narrow else tensor).numpy()


def assert_same(found: Mapping[str, stored.Kept], wanted: Mapping[str, Tensor], prefix: str = "") -> None:
    """Assert that the tensors have the bits, shapes and dtypes that were saved."""
    for name, tensor in wanted.items():
        kept = found[prefix + name]
        assert (kept.dtype, kept.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), name
        np.testing.assert_array_equal(kept.read(), values(tensor), err_msg=name)
        assert sum(chunk.size for chunk in kept.chunks()) == values(tensor).size


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few elements come in several stretches."""
    monkeypatch.setattr(stored, "CHUNK", 5)


def test_torch_archive(tmp_path: Path) -> None:
    """What torch.save writes: nested, with an optimizer's state, numbers, and objects of other classes."""
    tensors = state(LEGACY_DTYPES + NEW_DTYPES)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": tensors, "optimizer": optimizer.state_dict(), "epoch": 3, "args": argparse.Namespace(lr=0.1),
         "list": [torch.ones(2)]}, tmp_path / "x.pt",
    )  # fmt: skip
    found = open_checkpoint(tmp_path / "x.pt")
    assert found.format == "torch"
    assert_same(found.tensors, tensors, "model.")
    assert_same(found.tensors, {"0.exp_avg": optimizer.state_dict()["state"][0]["exp_avg"]}, "optimizer.state.")
    assert_same(found.tensors, {"list.0": torch.ones(2)})
    assert (found.values["epoch"], found.values["args.lr"]) == (3, 0.1)
    assert found.values["optimizer.param_groups.0.lr"] == 0.001
    assert found.unknown == ("argparse.Namespace",)
    assert found.tied["model.weight"] == ("model.tied",)


def test_format_before_archives(tmp_path: Path) -> None:
    """Files from before PyTorch 1.6, which many published weights still are, views of one storage among them."""
    tensors = state(LEGACY_DTYPES)
    torch.save({"model": tensors, "step": 7}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    found = open_checkpoint(tmp_path / "x.pt")
    assert_same(found.tensors, tensors, "model.")
    assert found.values == {"step": 7}
    assert found.tied["model.weight"] == ("model.tied",)


def test_safetensors(tmp_path: Path) -> None:
    """One file, with metadata."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state(LEGACY_DTYPES + NEW_DTYPES).items()
               if tensor.dtype is not torch.complex128}  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = open_checkpoint(tmp_path / "x.safetensors")
    assert (found.format, found.values, found.tied) == ("safetensors", {"format": "pt"}, {})
    assert_same(found.tensors, tensors)


def test_sharded_safetensors(tmp_path: Path) -> None:
    """An index and its shards, by the index or by the directory; a tensor that is promised and not there is an error."""
    tensors = {f"layer.{number}": torch.randn(3, number + 1) for number in range(4)}
    shards = {"model-1.safetensors": ["layer.0", "layer.1"], "model-2.safetensors": ["layer.2", "layer.3"]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, names in shards.items() for name in names}}))
    for path in (index, tmp_path):
        assert_same(open_checkpoint(path).tensors, tensors)
    index.write_text(json.dumps({"weight_map": {**dict.fromkeys(tensors, "model-1.safetensors")}}))
    with pytest.raises(CheckpointError, match=r"promises layer\.2 in model-1\.safetensors, which does not have it"):
        open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint(tmp_path: Path) -> None:
    """A directory of torch.distributed.checkpoint."""
    tensors = {name: t for name, t in state(LEGACY_DTYPES).items() if t.dtype is not torch.complex128}
    dcp.save({"model": tensors, "epoch": 3}, checkpoint_id=str(tmp_path / "dcp"))
    found = open_checkpoint(tmp_path / "dcp")
    assert (found.format, found.values) == ("distributed", {"epoch": 3})
    assert_same(found.tensors, tensors, "model.")


def test_pieces_are_put_together(tmp_path: Path) -> None:
    """A tensor in pieces is the whole, and a piece that lacks is an error."""
    whole = torch.arange(24.0).reshape(4, 6)
    torch.save({"0,0": whole[:2].clone(), "2,0": whole[2:].clone()}, tmp_path / "x.pt")
    tensors = open_checkpoint(tmp_path / "x.pt").tensors
    pieces = tuple((tuple(map(int, at.split(","))), piece) for at, piece in tensors.items())
    assert all(isinstance(piece, stored.Stored) for _, piece in pieces)
    assembled = stored.Assembled("float32", (4, 6), pieces)  # type: ignore[arg-type]
    assert_same({"x": assembled}, {"x": whole})
    with pytest.raises(CheckpointError, match="pieces of 12 elements of a tensor of 24"):
        stored.Assembled("float32", (4, 6), pieces[:1]).read()  # type: ignore[arg-type]


class Evil:
    """Runs a command when it is unpickled by others."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("new", [True, False])
def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, new: bool) -> None:
    """A pickle that would run a command is read, its weights are there, and the command was not run."""
    made = tmp_path / "made"
    torch.save({"w": torch.ones(3), "evil": Evil(made)}, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    found = open_checkpoint(tmp_path / "x.pt")
    assert_same(found.tensors, {"w": torch.ones(3)})
    assert found.unknown == ("posix.system",)
    assert not made.exists()


def _truncated(path: Path) -> None:
    save_file({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-40])


def _garbage(path: Path) -> None:
    path.write_bytes(b"not a checkpoint at all")


def _script(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x/data.pkl", "x/constants.pkl"):
            archive.writestr(name, pickle.dumps({}))


def _huge_header(path: Path) -> None:
    path.write_bytes((2**60).to_bytes(8, "little") + b"{" + bytes(20))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "a directory without"),
        (lambda path: path.write_bytes(b""), "neither a zip archive nor a pickle"),
        (_garbage, "neither a zip archive nor a pickle"),
        (_script, "a TorchScript archive"),
        (_huge_header, "a header of 1152921504606846976 bytes in a file of 29"),
        (lambda path: path.write_bytes(pickle.dumps({"w": 1})), "neither a zip archive nor a pickle of torch.save"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_a_reason(
    tmp_path: Path, make: Callable[[Path], Any], reason: str
) -> None:
    """One line says what was seen and what would be read."""
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_checkpoint(tmp_path / "x")
    assert "expected .safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_file_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    """A file that ends in the middle of a tensor is an error of reading it, never wrong numbers."""
    _truncated(tmp_path / "x.safetensors")
    found = open_checkpoint(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="in the middle of a tensor"):
        found.tensors["w"].read()


def test_reading_needs_no_torch_and_little_memory(tmp_path: Path) -> None:
    """A checkpoint of 256 MB is opened, measured and compared without torch in less than a quarter of its size."""
    save_file({f"w.{number}": torch.randn(8, 1 << 20) for number in range(8)}, tmp_path / "x.safetensors")
    code = (
        "import resource, sys\n"
        "import tracehooks\n"
        "from tracehooks import checkpoint\n"
        "import numpy\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert checkpoint.diff(sys.argv[1], sys.argv[1]).identical\n"
        "assert checkpoint.inspect(sys.argv[1]).healthy\n"
        "assert 'torch' not in sys.modules\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.safetensors"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 64 * 1024


def test_index_suffix_is_the_formats() -> None:
    """The name by which an index of shards is known."""
    assert opened.INDEX == ".index.json"
