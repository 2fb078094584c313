"""The command line of ``rwkv_clip.train``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rwkv_clip.config import ModelConfig, config_names, load_model_configs
from rwkv_clip.errors import InputError
from rwkv_clip.training.precision import Precision
from rwkv_clip.training.schedule import Shape

__all__ = ["DATA_HELP", "add_data_flags", "build_parser", "parse_args", "positive"]

DATA_HELP = "digits, a manifest (.csv, .parquet) of image paths and captions, or tar shards"


def build_parser() -> argparse.ArgumentParser:
    """The command line; every field of the model configuration is a flag as well."""
    parser = argparse.ArgumentParser(
        prog="python -m rwkv_clip.train",
        description="Train an RWKV-CLIP on image-text pairs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_run_flags(parser.add_argument_group("run"))
    group = parser.add_argument_group("data")
    add_data_flags(group)
    _add_training_data_flags(group)
    _add_optimiser_flags(parser.add_argument_group("optimiser"))
    _add_computing_flags(parser.add_argument_group("computing"))
    _add_process_flags(parser.add_argument_group("processes"))
    _add_checkpoint_flags(parser.add_argument_group("checkpoints"))
    _add_model_flags(parser.add_argument_group("model, in place of the configuration's value"))
    return parser


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output", required=True, type=Path, help="directory for checkpoints, training.log and tensorboard/")
    add("--config", default="digits", help=f"model configuration: a JSON file, or one of {', '.join(config_names())}")
    add("--model-weight-path", type=Path, help="checkpoint to start the weights from")
    add("--epochs", default=12, type=positive, help="passes over the pairs")
    add("--batch-size", default=64, type=positive, help="pairs of a micro-batch on each process")
    add("--seed", default=0, type=_seed, help="seed of weights, order, captions, augmentation and dropout")
    add("--frequent", default=20, type=positive, help="steps between two lines and two points of a TensorBoard curve")
    add("--trace", type=Path, metavar="DIR", help="record the run with tracehooks into DIR")
    add("--trace-every", default=1, type=positive, help="record full statistics every so many steps")


def add_data_flags(group: argparse._ArgumentGroup) -> None:
    """The flags that say where pairs come from; those who evaluate need them too."""
    add = group.add_argument
    add("--data", default="digits", help=DATA_HELP)
    add("--vocabulary", type=Path, help="file of CLIP's byte-pair merges; by default that of an installed package")
    add("--image-column", default="image", help="column of a manifest with the images' paths")
    add("--caption-columns", nargs="+", default=(), help="columns with captions; by default all named caption…")
    add("--workers", default=0, type=_not_negative, help="processes that load the data; 0: this one does")
    add("--on-broken", default="skip", choices=("skip", "stop"), help="what a broken image or row does to the run")


def _add_training_data_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--val-data", help="pairs to evaluate on after each epoch, of the same kinds; the digits have their own")
    add("--train-num-samples", type=positive, help="train on the first so many pairs only")
    add("--no-augment", action="store_true", help="neither crop nor mirror training images at random")


def _add_optimiser_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--lr", default=2e-3, type=_share_or_more, help="peak learning rate")
    add("--lr-scheduler", default="cosine", choices=typing.get_args(Shape), help="shape after the warm-up")
    add("--warmup", default=0.1, type=_share, help="share of the run until the peak learning rate")
    add("--beta1", default=0.9, type=_share, help="AdamW's decay of the first moment")
    add("--beta2", default=0.98, type=_share, help="AdamW's decay of the second moment")
    add("--cycle-momentum", action="store_true", help="let the first moment's decay go from 0.95 to 0.85 and back")
    add("--weight-decay", default=0.05, type=_share_or_more, help="AdamW's weight decay of matrices")
    add("--decay-all", action="store_true", help="let biases, norms, decays and the logit scale decay as well")
    add(
        "--clip-grad-norm", default=1.0, type=_share_or_more, help="largest norm of all gradients together; 0: no limit"
    )
    add("--gradient-acc", default=1, type=positive, help="micro-batches of a step; the loss compares all their pairs")


def _add_computing_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where to compute; auto: a GPU if there is one",
    )
    add("--threads", default=1, type=positive, help="CPU threads of torch; more than 1 pays for larger models only")
    add("--precision", default="fp32", choices=typing.get_args(Precision), help="arithmetic of matrix products")
    add("--init-scale", default=128.0, type=_above_zero, help="fp16: the gradient scaler's first scale")
    add("--growth-interval", default=200, type=positive, help="fp16: whole steps until the scale is doubled")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the model with torch.compile")
    add("--deterministic", action="store_true", help="only kernels that always give the same bits")


def _add_process_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--fsdp", action="store_true", help="spread parameters over the processes, in place of a copy on each")
    add("--local-loss", action="store_true", help="compare a process's own pairs with all, not all with all")
    add("--gather-with-grad", action="store_true", help="send the loss's gradients through the exchange of features")
    add("--stall-timeout", default=300.0, type=_share_or_more, help="seconds until a stopped rank is named; 0: never")


def _add_checkpoint_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--resume", metavar="WHICH", help="go on from latest, from the end of an epoch, or from a checkpoint's path")
    add("--save-every", default=0, type=_not_negative, help="save every so many steps as well; 0: after epochs only")
    add("--keep-last", default=0, type=_not_negative, help="keep the last so many epochs' checkpoints; 0: all")


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    for field, kind in typing.get_type_hints(ModelConfig).items():
        meaning = ModelConfig.__dataclass_fields__[field].metadata["help"]
        choices = typing.get_args(kind) or ((True, False) if kind is bool else None)
        parse = _boolean if kind is bool else str if choices else kind
        group.add_argument(_flag(field), type=parse, choices=choices, default=argparse.SUPPRESS, help=meaning)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, seen {text!r}")
    return text.lower() == "true"


def _number(kind: type, text: str, what: str, fits: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"expected {what}, seen {text!r}")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1, or the error that argparse expects."""
    return int(_number(int, text, "a whole number of at least 1", lambda value: value >= 1))


def _not_negative(text: str) -> int:
    return int(_number(int, text, "a whole number of at least 0", lambda value: value >= 0))


def _seed(text: str) -> int:
    return int(_number(int, text, "a whole number of at least 0, below 2^32", lambda value: 0 <= value < 1 << 32))


def _share(text: str) -> float:
    return float(_number(float, text, "a number in [0, 1)", lambda value: 0 <= value < 1))


def _share_or_more(text: str) -> float:
    return float(_number(float, text, "a number of at least 0", lambda value: 0 <= value < math.inf))


def _above_zero(text: str) -> float:
    return float(_number(float, text, "a number above 0", lambda value: 0 < value < math.inf))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the result also has every field of the model configuration, overrides applied.

    Raises:
        InputError: for an unknown configuration, or overrides that cannot be built.
        SystemExit: with status 2, for a malformed command line.
    """
    args = build_parser().parse_args(argv)
    if args.local_loss and not args.gather_with_grad:
        raise InputError("--local-loss needs --gather-with-grad: without it the gradients are wrong")
    config = dataclasses.asdict(load_model_configs(args.config))
    return argparse.Namespace(**(config | vars(args)))
