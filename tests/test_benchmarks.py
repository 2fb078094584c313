"""What benchmarks check before they time anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tracehooks.stats import reference


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_benchmark_says_so() -> None:
    """Without a GPU the benchmark of one ends with status 2 and one line."""
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr == "benchmarks.gpu: no GPU that torch can use is here\n"


def test_every_column_is_compared() -> None:
    """A row that differs from the reference's in any column is found."""
    right = reference.summarize(torch.randn(100), gpu.ALL)
    assert gpu.differences(right, right.clone()) is None
    for column in range(gpu.ALL.width):
        wrong = right.clone()
        wrong[column] += 1 << 40
        assert gpu.differences(wrong, right)
