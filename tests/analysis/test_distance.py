"""Distance and direction from sketches, held to those of the tensors themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tracehooks.analysis.distance import FLOOR, Distances, distances, in_words
from tracehooks.stats import Spec, summarize
from tracehooks.stats.layout import unpack

PAIRS = 300


def rows(tensors: list[Tensor]) -> dict[str, Any]:
    """The columns of rows that measure these tensors."""
    spec = Spec(sketch=True)
    return unpack(np.stack([np.asarray(summarize(tensor, spec)) for tensor in tensors]), spec)


def estimated(pairs: list[tuple[Tensor, Tensor]]) -> Distances:
    """Distances of pairs of tensors, from their rows."""
    return distances(rows([a for a, _ in pairs]), rows([b for _, b in pairs]))


def true(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The relative L2 distance and the cosine."""
    a, b = a.double().flatten(), b.double().flatten()
    return float((a - b).norm() / a.norm()), float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("noise", [1e-5, 1e-2, 0.3, 3.0])
def test_estimates_are_right_on_average_and_as_good_as_they_claim(noise: float) -> None:
    """Over many random pairs the estimates scatter around the truth as their standard errors say."""
    generator = torch.Generator().manual_seed(0)
    shape = (PAIRS, 2000)
    a = torch.randn(shape, generator=generator)
    pairs = list(zip(a, a + noise * torch.randn(shape, generator=generator), strict=True))
    found, truth = estimated(pairs), np.array([true(*pair) for pair in pairs])
    ratio = found.relative_l2 / truth[:, 0]
    assert ratio.mean() == pytest.approx(1, abs=0.04)
    assert ratio.std() < 0.21
    columns = (found.relative_l2, found.relative_l2_error), (found.cosine, found.cosine_error)
    for column, (estimate, error) in enumerate(columns):
        apart = np.abs(estimate - truth[:, column])
        assert np.mean(apart <= 3 * error) > 0.9
        assert np.mean(apart <= error / 3) < 0.4


def told(a: Tensor, b: Tensor) -> str:
    """The words for one pair."""
    return in_words(rows([a]), rows([b]))


def test_what_was_done_to_a_tensor_is_told_apart() -> None:
    """Scale, sign and order are named, rounding is no distance, where mean, min and max may all agree."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert told(x, x * (1 + 2**-23)).startswith("relative L2 1.2e-07 ± 5e-07, ")
    assert told(x, 1.5 * x).endswith(": scaled by 1.5")
    assert told(x, -1.5 * x).endswith(": scaled by -1.5")
    assert told(x, -x).endswith(": sign flipped")
    assert told(x, x.t().contiguous()).endswith(": the same values in another order (transposed, permuted)")
    assert told(x, x.flip(0)).endswith(": the same values in another order (transposed, permuted)")
    assert told(x, x + 0.1 * x.roll(1)).startswith("relative L2 0.")
    assert ":" not in told(x, x + 0.1 * x.roll(1))


def test_scale_and_sign_are_exact() -> None:
    """A multiple of a tensor is known without error."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    found = estimated([(x, 2 * x), (x, -x), (x, x)])
    np.testing.assert_allclose(found.relative_l2, [1, 2, 0], atol=1e-5)
    np.testing.assert_allclose(found.cosine, [1, -1, 1], atol=1e-6)
    assert found.relative_l2_error.max() < 1e-5


def test_few_elements_are_exact() -> None:
    """A tensor of at most 16 elements is known whole."""
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, -2.0, 5.0])
    found = estimated([(a, b)])
    assert (found.relative_l2[0], found.cosine[0]) == pytest.approx(true(a, b), rel=1e-5)
    assert found.cosine_error[0] == 0
    assert found.relative_l2_error[0] == FLOOR


def test_zeros_nan_and_missing_sketches() -> None:
    """A zero tensor has a distance but no direction; elements that are not finite count as 0; null stays unknown."""
    zero, one = torch.zeros(100), torch.ones(100)
    found = estimated([(zero, zero), (zero, one), (one, zero)])
    assert found.relative_l2.tolist() == [0, np.inf, 1]
    assert found.symmetric.tolist() == [0, 1, 1]
    assert np.isnan(found.cosine).all()
    holed = one.clone()
    holed[3] = float("nan")
    assert estimated([(holed, holed)]).relative_l2.tolist() == [0]
    unknown = rows([one])
    unknown["sketch"] = np.full_like(unknown["sketch"], np.nan)
    assert np.isnan(distances(unknown, rows([one])).relative_l2).all()
    assert in_words({name: column for name, column in unknown.items() if name != "sketch"}, rows([one])) == ""
