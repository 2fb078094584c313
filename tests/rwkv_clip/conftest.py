"""What the tests of rwkv_clip share: the original's numbers, weights made from their names, a small model."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import rwkv_clip
from rwkv_clip import ModelConfig
from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.data.digits import DIGIT_NAMES
from tests.rwkv_clip import originals


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and other test workers use the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def numbers() -> Callable[[str], Any]:
    """Read a file of the original's numbers."""
    return originals.read


@pytest.fixture(scope="session")
def config_of() -> Callable[[str], ModelConfig]:
    """Read one of the configurations that the original was run with."""
    return originals.config_of


@pytest.fixture(scope="session")
def model_of() -> Callable[..., RWKVCLIP]:
    """Build one of them with the weights that it was run with, in eval mode."""
    return originals.model_of


@pytest.fixture(scope="session")
def inputs_of() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Images (4, 3, S, S) float32 and tokens (4, T) that a configuration was run with."""
    return originals.inputs_of


@pytest.fixture(scope="session")
def small_config() -> ModelConfig:
    """The smallest model that the digits fit."""
    return ModelConfig(
        input_size=8, image_depth=1, image_embed_dims=16, image_patch_size=4, image_hidden_rate=2, image_num_heads=2,
        ctx_len=12, vocab_size=48, head_size=8, n_layer=1, n_embd=16, dim_ffn=32,
    )  # fmt: skip


@pytest.fixture(scope="session")
def small_flags() -> list[str]:
    """Command-line flags of a run of a few seconds: the smallest model, 48 digits, batches of 16."""
    return shlex.split(
        "--data digits --train-num-samples 48 --batch-size 16 --epochs 2 --frequent 2 --input-size 8 --image-depth 1 "
        "--image-embed-dims 16 --n-embd 16 --dim-att 0 --dim-ffn 32 --image-num-heads 2 --head-size 8 --n-layer 1"
    )


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a fresh Python that finds this rwkv_clip, in a working directory of its own choice."""

    def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        package = str(Path(rwkv_clip.__file__).parents[1])
        variables = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=120)

    return run


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 real digits as image files of several sizes, a manifest of them with two captions each, and a tar shard."""
    folder = tmp_path_factory.mktemp("pictures")
    digits = load_digits()
    rows = []
    for i in range(24):
        image = Image.fromarray((digits.images[i] * 255 / 16).astype(np.uint8)).resize((12 + i % 5, 14 - i % 3))
        image.save(folder / f"{i:03}.png")
        name = DIGIT_NAMES[digits.target[i]]
        rows.append((f"{i:03}.png", f"picture {i} of the digit {name}", f"a {name}", int(digits.target[i])))
    table = pa.table(dict(zip(("image", "caption", "caption_short", "label"), zip(*rows, strict=True), strict=True)))
    pyarrow.csv.write_csv(table, folder / "pairs.csv")
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    with tarfile.open(folder / "pairs-000.tar", "w") as shard:
        for image, caption, _, label in rows:
            key = Path(image).stem
            shard.add(folder / image, f"{key}.png")
            for suffix, text in (("txt", caption), ("cls", str(label))):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(text)
                shard.addfile(member, io.BytesIO(text.encode()))
    return folder


@pytest.fixture(scope="session")
def picture_flags(pictures: Path) -> list[str]:
    """Flags, after the small ones, of a run on the manifest: its vocabulary is CLIP's."""
    return shlex.split(f"--data {pictures / 'pairs.csv'} --vocab-size 49408 --ctx-len 12 --batch-size 8")
