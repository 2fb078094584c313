"""Renamed and moved modules, found by what they look like."""

from __future__ import annotations

from tracehooks.analysis.moved import Look, guess, in_words


def looks(*modules: tuple[str, str]) -> list[Look]:
    """Modules by path and class."""
    return [Look(path, (kind, frozenset())) for path, kind in modules]


def test_renamed_modules_pair_off_in_order() -> None:
    """Modules that look alike pair off in execution order; those of equal path are left alone."""
    a = looks(("stem", "Conv"), ("layers.0", "Linear"), ("layers.1", "Linear"), ("head", "Linear"))
    b = looks(("stem", "Conv"), ("blocks.0", "Linear"), ("blocks.1", "Linear"), ("head", "Linear"))
    assert guess(a, b) == {"layers.0": "blocks.0", "layers.1": "blocks.1"}


def test_other_looks_are_not_matched() -> None:
    """Another class or other shapes are another module, also at the same place."""
    a = [Look("x", ("Linear", frozenset({("forward", "output", (4,))})))]
    b = [Look("y", ("Linear", frozenset({("forward", "output", (5,))})))]
    assert guess(a, b) == {}
    assert guess(looks(("x", "Linear")), looks(("y", "Conv"))) == {}


def test_added_modules_stay_added() -> None:
    """With a module inserted, the others still find their counterparts."""
    a = looks(("a.0", "Linear"), ("a.1", "GELU"), ("a.2", "Linear"))
    b = looks(("b.0", "Linear"), ("b.1", "GELU"), ("b.2", "Dropout"), ("b.3", "Linear"))
    assert guess(a, b) == {"a.0": "b.0", "a.1": "b.1", "a.2": "b.3"}


def test_guesses_are_told_by_pattern() -> None:
    """Guesses that differ in equal numbers are told once; those whose numbers shift are told each."""
    assert in_words({"layers.0.fc": "blocks.0.fc", "layers.1.fc": "blocks.1.fc", "a.1": "b.0", "x": "y"}) == [
        "layers.*.fc → blocks.*.fc (2 modules)",
        "a.1 → b.0",
        "x → y",
    ]
