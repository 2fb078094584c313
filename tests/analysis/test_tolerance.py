"""The tolerance by dtype, depth and step."""

from __future__ import annotations

import numpy as np
import pytest

from tracehooks.analysis.tolerance import EPSILON, SAFETY, Tolerance, tolerance_for


def test_grows_with_depth_like_a_random_walk() -> None:
    """At depth 0 the tolerance is SAFETY roundings; it grows with the square root of the depth."""
    depth = np.array([0, 16, 16 * 99])
    allowed = Tolerance().allowed(np.full(3, EPSILON["float32"]), depth)
    assert allowed == pytest.approx(SAFETY * 2.0**-23 * np.array([1, np.sqrt(2), 10]))


@pytest.mark.parametrize(("dtype", "epsilon"), [("float32", 2**-23), ("bfloat16", 2**-7), ("int64", 0), ("bool", 0)])
def test_epsilon(dtype: str, epsilon: float) -> None:
    """Floating-point dtypes have the distance from 1 to the next number, whole numbers none."""
    assert Tolerance().epsilon(dtype, "cpu") == epsilon


@pytest.mark.parametrize("flags", [{"allow_tf32": True}, {"cuda.matmul.TF32": 1}, {"float32_matmul_precision": "high"}])
def test_tf32(flags: dict[str, object]) -> None:
    """Where either run lets CUDA use TF32, float32 on CUDA is that coarse; on the CPU it is not."""
    tolerance = tolerance_for("auto", {"flags": flags}, {})
    assert tolerance.epsilon("float32", "cuda:0") == EPSILON["tf32"]
    assert tolerance.epsilon("float32", "cpu") == EPSILON["float32"]
    assert not tolerance_for("auto", {"flags": {"allow_tf32": False}}, {}).tf32


def test_environment() -> None:
    """Host, devices and packages make an environment."""
    here = {"host": "a", "packages": {"torch": "2.9"}}
    assert tolerance_for("auto", here, dict(here)).same_environment
    assert not tolerance_for("auto", here, {**here, "packages": {"torch": "2.10"}}).same_environment
    assert not tolerance_for(1e-3, here, here).same_environment
