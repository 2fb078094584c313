"""What those who look at a checkpoint share: finding its configuration, loading it, running it over data."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rwkv_clip.checkpoint import load_model_weight
from rwkv_clip.clip import RWKVCLIP, create_RWKV_Model
from rwkv_clip.config import ModelConfig, config_names, load_model_configs
from rwkv_clip.data import open_pairs
from rwkv_clip.data.pairs import Pairs
from rwkv_clip.errors import InputError
from rwkv_clip.training.flags import add_data_flags, positive
from rwkv_clip.training.precision import Precision, autocast
from rwkv_clip.training.resume import saved_settings

__all__ = [
    "BATCH",
    "add_config_flag",
    "config_of",
    "evaluating",
    "evaluation_parser",
    "open_held_out",
    "report_broken",
    "reporting",
]  # fmt: skip

BATCH = 128


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """``--config``, which a checkpoint of rwkv_clip.train can do without."""
    known = ", ".join(config_names())
    parser.add_argument("--config", help=f"its configuration ({known}, a JSON file); default: what it was trained with")


def evaluation_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The command line of an evaluation of one checkpoint on one data set."""
    parser = argparse.ArgumentParser(
        prog=f"python -m rwkv_clip.{prog}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="RWKV_CLIP_model_<epoch>.pt, or a published model's file")
    add_config_flag(parser)
    add_data_flags(parser.add_argument_group("data"))
    add = parser.add_argument_group("computing").add_argument
    add("--batch-size", default=BATCH, type=positive, help="images at a time")
    add("--device", default="cpu", help="where to compute: cpu, cuda")
    add("--precision", default="fp32", choices=typing.get_args(Precision), help="arithmetic of matrix products")
    return parser


def config_of(checkpoint: Path, config: str | None) -> ModelConfig:
    """Return the named configuration, or the one that the training state beside the checkpoint was saved with.

    Raises:
        InputError: when none is named and there is no training state.
    """
    if config is not None:
        return load_model_configs(config)
    if not checkpoint.is_file():
        raise InputError(f"no checkpoint {checkpoint}: no such file")
    settings = saved_settings(checkpoint)
    if settings is None:
        raise InputError(f"{checkpoint}: no training state beside it says how the model was built; give --config")
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    return ModelConfig.from_mapping({name: settings[name] for name in names}, source=str(checkpoint))


@contextmanager
def evaluating(args: argparse.Namespace) -> Iterator[RWKVCLIP]:
    """The checkpoint's model in eval mode, in a block without gradients and in the asked precision."""
    model = create_RWKV_Model(config_of(args.checkpoint, args.config))
    try:
        device = torch.device(args.device)
        load_model_weight(model, args.checkpoint).eval().to(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    with torch.no_grad(), autocast(args.precision, device):
        yield model


def open_held_out(args: argparse.Namespace, config: ModelConfig) -> Pairs:
    """The pairs of ``--data``, unaugmented; broken rows are said on stderr, or stop it."""
    pairs = open_pairs(
        args.data, config, "held-out",
        vocabulary=args.vocabulary, image_column=args.image_column, caption_columns=tuple(args.caption_columns),
    )  # fmt: skip
    report_broken(pairs.problems, args.on_broken)
    return pairs


def report_broken(problems: typing.Iterable[str], policy: str) -> None:
    """Say on stderr what is broken and left out.

    Raises:
        InputError: for the first of them, if the policy is ``stop``.
    """
    for problem in problems:
        if policy == "stop":
            raise InputError(f"broken: {problem}")
        print(f"left out, broken: {problem}", file=sys.stderr)


def reporting(prog: str, work: Callable[[], int]) -> int:
    """Return the work's exit status, or 2 with one message on stderr for input that does not fit."""
    try:
        return work()
    except InputError as error:
        print(f"rwkv_clip.{prog}: {error}", file=sys.stderr)
        return 2
