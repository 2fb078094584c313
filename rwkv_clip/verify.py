"""Look at checkpoints in isolation: ``python -m rwkv_clip.verify CHECKPOINT…``.

Are keys and shapes those of the model, are all numbers finite, does a dummy batch come through? With several
checkpoints also: which weights grew or shrank most from the first to the last.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

from rwkv_clip.clip import RWKVCLIP, create_RWKV_Model
from rwkv_clip.errors import InputError
from rwkv_clip.evaluation import add_config_flag, config_of, reporting

__all__ = ["main", "problems_of", "rms"]

SHOWN = 8
DUMMIES = 2


def rms(values: Tensor) -> float:
    """Root of the mean square, in float64; nan or inf where a value is."""
    return float(values.double().square().mean().sqrt())


def problems_of(model: RWKVCLIP) -> list[str]:
    """Return what is wrong with a loaded model, empty for a sound one: weights or features that are not finite."""
    problems = [
        f"{name} {tuple(value.shape)}: {int(value.isnan().sum())} NaN, {int(value.isinf().sum())} infinite"
        for name, value in model.state_dict().items()
        if not value.isfinite().all()
    ]
    config = model.config
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(DUMMIES, 3, config.input_size, config.input_size, generator=generator)
    tokens = torch.randint(0, config.vocab_size, (DUMMIES, config.ctx_len), generator=generator)
    with torch.no_grad():
        outputs = dict(zip(("image features", "text features", "scale"), model(image, tokens), strict=True))
    return problems + [
        f"{name} of a dummy batch: {int((~value.isfinite()).sum())} of {value.numel()} not finite"
        for name, value in outputs.items()
        if not value.isfinite().all()
    ]


def _describe(path: Path, model: RWKVCLIP, problems: Sequence[str], pattern: str) -> None:
    weights = model.state_dict()
    values = sum(value.numel() for value in weights.values())
    print(f"{path}: {'damaged' if problems else 'sound'}")
    print(f"  {len(weights)} tensors, {values:,} values; keys and shapes are the model's")
    print(f"  scale exp(logit_scale) {float(model.logit_scale.detach().exp()):.2f}")
    for problem in problems:
        print(f"  {problem}")
    chosen = {name: value for name, value in weights.items() if fnmatch(name, pattern)}
    largest = sorted(chosen, key=lambda name: _magnitude(chosen[name]), reverse=True)[:SHOWN]
    for name in largest:
        print(f"  largest {float(chosen[name].abs().max()):10.4g}  rms {rms(chosen[name]):10.4g}  {name}")


def _magnitude(value: Tensor) -> float:
    largest = float(value.abs().max())
    return math.inf if math.isnan(largest) else largest


def _compare(weights: Sequence[Mapping[str, float]], pattern: str) -> None:
    """A table of each weight's root mean square in every checkpoint, those that changed most by a factor first."""
    first, last = weights[0], weights[-1]
    names = [name for name in first if fnmatch(name, pattern)]
    changed = sorted(names, key=lambda name: _factor(first[name], last[name]), reverse=True)[:SHOWN]
    print("root mean square in each checkpoint, what changed most first")
    for name in changed:
        print("  " + "  ".join(f"{state[name]:10.4g}" for state in weights) + f"  {name}")


def _factor(before: float, after: float) -> float:
    """How many times one is the other; a value that appears from nothing, or is no number, comes first."""
    if not (math.isfinite(before) and math.isfinite(after)) or (before == 0) != (after == 0):
        return math.inf
    return 1.0 if before == after else max(after / before, before / after)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 sound, 1 numbers that are not finite, 2 input that does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m rwkv_clip.verify",
        description="Load checkpoints in isolation: keys, shapes, finite numbers, a dummy batch, weight statistics.",
    )
    parser.add_argument("checkpoint", type=Path, nargs="+", help="RWKV_CLIP_model_<epoch>.pt; several are compared")
    add_config_flag(parser)
    parser.add_argument("--weights", default="*", metavar="PATTERN", help="glob of the weights to list; default: all")
    args = parser.parse_args(argv)

    def work() -> int:
        damaged, weights = False, list[dict[str, float]]()
        for path in args.checkpoint:
            model = create_RWKV_Model(config_of(path, args.config), path).eval()
            problems = problems_of(model)
            damaged |= bool(problems)
            _describe(path, model, problems, args.weights)
            weights.append({name: rms(value) for name, value in model.state_dict().items()})
        if len(weights) > 1:
            if any(state.keys() != weights[0].keys() for state in weights):
                raise InputError("the checkpoints are of different models and cannot be compared")
            _compare(weights, args.weights)
        return 1 if damaged else 0

    return reporting("verify", work)


if __name__ == "__main__":
    sys.exit(main())
