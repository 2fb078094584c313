"""Whether a state dict really is in a model: names that do not meet, and values that are not those that were kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tracehooks.core.errors import InvalidOptionError, shown
from tracehooks.core.records import Finding

RULE = "checkpoint_not_loaded"
FAR = 0.5
"""Relative distance between a weight and the one kept, from which on it is taken for another one: training moves weights
by much less, a fresh start by about √2."""


def check(model: nn.Module, state: Mapping[str, Any]) -> list[Finding]:
    """What of a state dict is not in a model that was meant to be loaded from it; nothing when all is.

    Args:
        model: the live model; a few steps of training after loading do no harm.
        state: names to tensors, as ``state_dict()`` gives them. Anything that is no tensor is left out.

    Returns:
        At most one finding of rule ``checkpoint_not_loaded``. Its evidence counts the names that are ``loaded``,
        ``missing`` in the state and ``unexpected`` in the model, and has the ``prefix`` that would make them meet, the
        missing ``params``, those of another shape, and the ``cause``: key_prefix, tied_weight_missing,
        shape_mismatch, values_differ or missing_keys.

    Raises:
        InvalidOptionError: ``model`` is no module, or ``state`` no mapping with a tensor in it.
    """
    if not isinstance(model, nn.Module):
        raise InvalidOptionError("model", shown(model), "a torch.nn.Module")
    kept = (
        {name: value for name, value in state.items() if isinstance(value, Tensor)}
        if isinstance(state, Mapping)
        else {}
    )
    if not kept:
        raise InvalidOptionError("state", type(state).__name__, "a state dict: a mapping from names to tensors")
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing, unexpected = [n for n in own if n not in kept], [n for n in kept if n not in own]
    both = [name for name in own if name in kept]
    misshapen = [name for name in both if own[name].shape != kept[name].shape]
    loaded = [name for name in both if name not in misshapen]
    far = [name for name in loaded if _far(own[name], kept[name])]
    prefix = _prefix(own, kept) if len(missing) == len(own) or len(unexpected) == len(kept) else None
    cause = _cause(own, missing, unexpected, misshapen, far, loaded, prefix)
    if cause is None:
        return []
    evidence: dict[str, Any] = {
        "loaded": len(loaded) - len(far),
        "missing": len(missing),
        "unexpected": len(unexpected),
        "params": far if cause == "values_differ" else [*missing, *misshapen],
        "names": unexpected,
        "cause": cause,
        "count": len(own),
    }
    if prefix is not None:
        evidence["prefix"] = prefix
    message = (
        f"{len(loaded) - len(far)} of the model's {len(own)} tensors come from the checkpoint: {len(missing)} are missing "
        f"in it, {len(unexpected)} of it are not expected, {len(misshapen)} have another shape, {len(far)} other values"
    )
    site = (evidence["params"] or [""])[0]
    return [Finding(RULE, "error", 0, site, message, evidence, _next_check(cause, prefix))]


def _cause(
    own: Mapping[str, Tensor],
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
    far: list[str],
    loaded: list[str],
    prefix: str | None,
) -> str | None:
    if prefix is not None:
        return "key_prefix"
    if misshapen:
        return "shape_mismatch"
    if missing:
        tied = all(any(own[name].shape == own[other].shape for other in loaded) for name in missing)
        return "tied_weight_missing" if tied and not unexpected else "missing_keys"
    if loaded and len(far) > 0.5 * len([name for name in loaded if _comparable(own[name])]):
        return "values_differ"
    return "unexpected_keys" if unexpected else None


def _prefix(own: Iterable[str], kept: Iterable[str]) -> str | None:
    """What stands before every name of one side and of the other not; None where no such text makes names meet."""
    mine, theirs = set(own), set(kept)
    for names, others in ((theirs, mine), (mine, theirs)):
        candidates = {name[: -len(other)] for name in list(names)[:1] for other in others if name.endswith(f".{other}")}
        for candidate in sorted(candidates):
            if sum(name.removeprefix(candidate) in others for name in names) >= 0.5 * min(len(names), len(others)):
                return candidate
    return None


def _comparable(x: Tensor) -> bool:
    return x.is_floating_point() and x.ndim >= 2 and x.layout == torch.strided and not x.is_meta


def _far(a: Tensor, b: Tensor) -> bool:
    if not _comparable(a) or not _comparable(b):
        return False
    with torch.no_grad():
        x, y = a.detach().cpu().double(), b.detach().cpu().double()
        return bool((x - y).norm() > FAR * y.norm()) and bool(y.norm() > 0)


def _next_check(cause: str, prefix: str | None) -> str:
    return {
        "key_prefix": f"take {prefix!r} off (or put it before) the names, and load with strict=True",
        "shape_mismatch": "build the model with the configuration it was saved with",
        "tied_weight_missing": "tie the named weight to the one it shares, or copy it, after loading",
        "missing_keys": "load with strict=True and rename what the error lists",
        "values_differ": "load the state after the last initialisation, and compare one weight before and after",
        "unexpected_keys": "the checkpoint holds more than the model: is it another architecture?",
    }[cause]
