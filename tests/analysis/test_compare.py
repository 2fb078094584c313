"""When two rows say the same: examples for each rule of docs/diff.md."""

from __future__ import annotations

from typing import Any

import pytest

from tracehooks.analysis.diff import diff
from tracehooks.testing import TraceBuilder

SKETCH = [float(number) for number in range(16)]
HERE, THERE = {"host": "here"}, {"host": "there"}


def judged(a: dict[str, Any], b: dict[str, Any], tolerance: Any = "auto", **site: Any) -> tuple[str, float | None]:
    """Status and difference of one row recorded on two machines."""
    run_a = TraceBuilder(HERE).tensor("m", **site, **a).run()
    run_b = TraceBuilder(THERE).tensor("m", **site, **b).run()
    row = diff(run_a, run_b, tolerance=tolerance).rows.to_pylist()[0]
    return row["status"], row["difference"]


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ({"hash": 1, "mean": 1.0}, {"hash": 1, "mean": 1.0}, "equal"),
        ({"hash": 1}, {"hash": 2}, "within"),
        ({"hash": 1, "dtype": "int64"}, {"hash": 2, "dtype": "int64"}, "differs"),
        ({"hash": 1, "dtype": "bool"}, {"hash": 2, "dtype": "bool"}, "differs"),
        ({"mean": 1.0}, {"mean": 1.0}, "equal"),
        ({"mean": None}, {"mean": None}, "equal"),
        ({"mean": None}, {"mean": 1.0}, "differs"),
        ({"mean": 1.0}, {"mean": 1.0 + 2**-23}, "within"),
        ({"mean": 1.0}, {"mean": 1.0 + 2**-20}, "differs"),
        ({"mean": 1.0, "dtype": "bfloat16"}, {"mean": 1.0 + 2**-7, "dtype": "bfloat16"}, "within"),
        ({"mean": 1.0, "dtype": "float64"}, {"mean": 1.0 + 2**-23, "dtype": "float64"}, "differs"),
        ({"mean": 1.0, "dtype": "int64"}, {"mean": 1.0 + 2**-52, "dtype": "int64"}, "differs"),
        ({"nan": 1}, {"nan": 1}, "equal"),
        ({"nan": 1}, {"nan": 2}, "differs"),
        ({"posinf": 1}, {"neginf": 1}, "differs"),
        ({"zeros": 1}, {"zeros": 2}, "within"),
        ({"shape": (4, 1)}, {"shape": (1, 4)}, "shape"),
        ({"shape": (4, 1), "hash": 1}, {"shape": (1, 4), "hash": 1}, "shape"),
        ({"shape": ()}, {"shape": (1,)}, "shape"),
        ({"dtype": "float32", "mean": 1.0}, {"dtype": "bfloat16", "mean": 1.0 + 2**-8}, "dtype"),
        ({"dtype": "float32", "mean": 1.0}, {"dtype": "bfloat16", "mean": 1.5}, "differs"),
        ({"hash": 1, "sketch": SKETCH, "std": 4.0, "shape": (16,)},
         {"hash": 2, "sketch": SKETCH[::-1], "std": 4.0, "shape": (16,)}, "differs"),
        ({"hash": 1, "sketch": SKETCH, "std": 4.0}, {"hash": 2, "sketch": SKETCH, "std": 4.0}, "within"),
        ({"hash": 1, "sketch": SKETCH}, {"hash": 2, "sketch": None}, "within"),
        ({"sketch": SKETCH, "std": 1.0}, {"sketch": SKETCH[::-1], "std": 1.0}, "differs"),
    ],
)  # fmt: skip
def test_status(a: dict[str, Any], b: dict[str, Any], status: str) -> None:
    """Each pair of rows is judged as docs/diff.md says."""
    assert judged(a, b)[0] == status
    assert judged(b, a)[0] == status


def test_difference_is_relative() -> None:
    """Means are told apart by the larger rms, extremes by the larger magnitude, elements by the sketch."""
    assert judged(
        {"mean": 1.0, "rms": 4.0, "min": 0.0, "max": 8.0}, {"mean": 3.0, "rms": 4.0, "min": 0.0, "max": 8.0}
    ) == (
        "differs",
        0.5,
    )
    assert judged({"max": 8.0}, {"max": 6.0}) == ("differs", 0.25)
    x, y = [3.0] + [0.0] * 15, [3.0, 4.0] + [0.0] * 14  # sketches of tensors of 16 elements, one in each sum
    status, difference = judged(
        {"shape": (16,), "rms": 3 / 4, "sketch": x}, {"shape": (16,), "rms": 5 / 4, "sketch": y}
    )
    assert (status, difference) == ("differs", pytest.approx(4 / 5))


def test_counts_that_disagree_are_infinitely_far() -> None:
    """There is no small difference between one NaN and two."""
    assert judged({"nan": 1}, {"nan": 2}, tolerance=1e9) == ("differs", float("inf"))


def test_relative_tolerance() -> None:
    """A number is the tolerance of every floating-point row; 0 asks for equal bits."""
    assert judged({"mean": 1.0}, {"mean": 1.01}, tolerance=0.02)[0] == "within"
    assert judged({"mean": 1.0}, {"mean": 1.01}, tolerance=0.005)[0] == "differs"
    assert judged({"hash": 1}, {"hash": 2}, tolerance=0)[0] == "differs"
    assert judged({"mean": 1.0, "dtype": "int32"}, {"mean": 1.01, "dtype": "int32"}, tolerance=0.5)[0] == "differs"


def test_sketch_of_a_rounding_error_is_within() -> None:
    """Differences below the sketch's own float32 rounding are no distance."""
    near = [value * (1 + 2**-23) for value in SKETCH]
    wide = {"shape": (1000,), "std": 1.0, "dtype": "float64"}
    assert judged({**wide, "hash": 1, "sketch": SKETCH}, {**wide, "hash": 2, "sketch": near}) == ("within", 0.0)


def test_initial_parameters_are_exact_in_one_environment() -> None:
    """On one machine the parameters of step 0 have not been computed, so other bits are another parameter."""
    a = TraceBuilder(HERE).tensor("m", "weight", "parameter", hash=1)
    b = TraceBuilder(HERE).tensor("m", "weight", "parameter", hash=2)
    assert diff(a.run(), b.run()).rows["status"].to_pylist() == ["differs"]
    later = [TraceBuilder(HERE).step(1).tensor("m", "weight", "parameter", hash=value).run() for value in (1, 2)]
    assert diff(*later).rows["status"].to_pylist() == ["within"]
    assert judged({"hash": 1}, {"hash": 2}, slot="weight", phase="parameter")[0] == "within"


def test_scalars_are_compared_except_times() -> None:
    """loss, lr and scale count, times do not, and NaN equals NaN."""
    a = (
        TraceBuilder()
        .scalar("loss", float("nan"))
        .scalar("lr/0", 0.1)
        .scalar("scale", 2.0**16)
        .scalar("time/step", 1.0)
    )
    b = (
        TraceBuilder()
        .scalar("loss", float("nan"))
        .scalar("lr/0", 0.1)
        .scalar("scale", 2.0**15)
        .scalar("time/step", 2.0)
    )
    found = diff(a.run(), b.run())
    assert dict(zip(found.rows["slot"].to_pylist(), found.rows["status"].to_pylist(), strict=True)) == {
        "loss": "equal",
        "lr/0": "equal",
        "scale": "differs",
    }
    assert found.first is not None
    assert str(found.first) == "step 0: scale: 6.554e+04 → 3.277e+04 (relative difference 0.5, tolerance 8.9e-16)"
