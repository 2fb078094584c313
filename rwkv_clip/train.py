"""Train an RWKV-CLIP: ``python -m rwkv_clip.train --data digits --output DIR``.

One process, float32, on the CPU. ``--help`` lists the flags; docs/rwkv_clip.md says what each does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from rwkv_clip.checkpoint import load_model_weight, save_model
from rwkv_clip.clip import RWKVCLIP, get_model_RWKV_CLIP
from rwkv_clip.config import ModelConfig, config_names, load_model_configs
from rwkv_clip.data import CAPTION_TEMPLATES, DATA_SETS, DIGIT_NAMES, DigitPairs, open_pairs
from rwkv_clip.errors import InputError
from rwkv_clip.loss import ClipLoss
from rwkv_clip.optimizer import Schedule, make_optimizer, make_scheduler
from rwkv_clip.progress import Display, show
from rwkv_clip.speed import Interval, SpeedCallBack
from rwkv_clip.zero_shot import class_embeddings, zero_shot_accuracy

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Run", "build", "build_parser", "evaluate", "main", "parse_args", "train_epoch"]

EVALUATION_BATCH = 128
LARGEST_LOGIT_SCALE = math.log(100)  # of the logarithm; Radford et al., "CLIP" (2021), section 2.5

Batches = DataLoader[tuple[Tensor, Tensor, int]]  # what an item holds; a batch holds a tensor in each place


class Scalars(Protocol):
    """What takes a named number of the run: a trace, or nothing."""

    def scalar(self, name: str, value: float) -> None:
        """Record ``value`` under ``name`` at the current step."""


class Untraced:
    """Stands in for a trace when none is asked for."""

    def scalar(self, name: str, value: float) -> None:
        """Do nothing."""


@dataclasses.dataclass(slots=True)
class Run:
    """Everything one training run is made of."""

    args: argparse.Namespace
    model: RWKVCLIP
    pairs: DigitPairs
    held_out: DigitPairs
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    loss: ClipLoss
    steps_total: int
    step: int = 0  # optimiser steps done


def build_parser() -> argparse.ArgumentParser:
    """The command line. Flags named after a field of the model configuration override that field."""
    parser = argparse.ArgumentParser(
        prog="python -m rwkv_clip.train",
        description="Train an RWKV-CLIP (one process, float32).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run = parser.add_argument_group("run")
    add = run.add_argument
    add("--output", required=True, type=Path, help="directory for checkpoints, training.log and tensorboard/")
    add("--data", default="digits", help=f"what to train on: {', '.join(DATA_SETS)}")
    add("--config", default="digits", help=f"model configuration: a JSON file, or one of {', '.join(config_names())}")
    add("--model-weight-path", type=Path, help="checkpoint to start the weights from")
    add("--train-num-samples", type=_positive, help="train on the first so many pairs only")
    add("--epochs", default=12, type=_positive, help="passes over the pairs")
    add("--batch-size", default=64, type=_positive, help="pairs of a step; each image is compared with every caption")
    add("--seed", default=0, type=int, help="seed of weights, order and captions")
    add("--threads", default=1, type=_positive, help="CPU threads of torch; more than 1 pays for larger models only")
    add("--frequent", default=20, type=_positive, help="steps between two lines and two points of a TensorBoard curve")
    add("--trace", type=Path, metavar="DIR", help="record the run with tracehooks into DIR")
    add("--trace-every", default=1, type=_positive, help="record full statistics every so many steps")

    add = parser.add_argument_group("optimiser").add_argument
    add("--lr", default=2e-3, type=_share_or_more, help="peak learning rate")
    add("--lr-scheduler", default="cosine", choices=typing.get_args(Schedule), help="shape after the warm-up")
    add("--warmup", default=0.1, type=_share, help="share of the run until the peak learning rate")
    add("--beta1", default=0.9, type=_share, help="AdamW's decay of the first moment, the same all through the run")
    add("--beta2", default=0.98, type=_share, help="AdamW's decay of the second moment")
    add("--weight-decay", default=0.05, type=_share_or_more, help="AdamW's weight decay of matrices")
    add("--decay-all", action="store_true", help="let biases, norms, decays and the logit scale decay as well")
    add(
        "--clip-grad-norm", default=1.0, type=_share_or_more, help="largest norm of all gradients together; 0: no limit"
    )

    add = parser.add_argument_group("model, in place of the configuration's value").add_argument
    for field, kind in typing.get_type_hints(ModelConfig).items():
        meaning = ModelConfig.__dataclass_fields__[field].metadata["help"]
        choices = typing.get_args(kind) or ((True, False) if kind is bool else None)
        parse = _boolean if kind is bool else str if choices else kind
        add(_flag(field), type=parse, choices=choices, default=argparse.SUPPRESS, help=meaning)
    return parser


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


def _positive(text: str) -> int:
    return int(_number(int, text, "a whole number of at least 1", lambda value: value >= 1))


def _share(text: str) -> float:
    return float(_number(float, text, "a number in [0, 1)", lambda value: 0 <= value < 1))


def _share_or_more(text: str) -> float:
    return float(_number(float, text, "a number of at least 0", lambda value: 0 <= value < math.inf))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the result also has every field of the model configuration, overrides applied.

    Raises:
        InputError: for an unknown configuration, or overrides that cannot be built.
        SystemExit: with status 2, for a malformed command line.
    """
    args = build_parser().parse_args(argv)
    config = dataclasses.asdict(load_model_configs(args.config))
    chosen = vars(args)
    return argparse.Namespace(**(config | chosen))


def build(args: argparse.Namespace) -> Run:
    """Make the model, the data and the optimiser of a run. Seeds torch's global generator with ``args.seed``.

    Raises:
        InputError: for an unknown data set, a model that does not fit the data, or a checkpoint that does not fit.
    """
    torch.manual_seed(args.seed)
    model = get_model_RWKV_CLIP(args)
    if args.model_weight_path is not None:
        load_model_weight(model, args.model_weight_path)
    pairs = open_pairs(args.data, model.config, "train", seed=args.seed, limit=args.train_num_samples)
    held_out = open_pairs(args.data, model.config, "held-out", seed=args.seed)
    betas = (args.beta1, args.beta2)
    optimizer = make_optimizer(model, lr=args.lr, betas=betas, weight_decay=args.weight_decay, decay_all=args.decay_all)
    steps_total = args.epochs * len(_batches(pairs, args, epoch=0))
    scheduler = make_scheduler(optimizer, steps_total, warmup=args.warmup, schedule=args.lr_scheduler)
    return Run(args, model, pairs, held_out, optimizer, scheduler, ClipLoss(), steps_total)


def _batches(pairs: DigitPairs, args: argparse.Namespace, *, epoch: int) -> Batches:
    """The pairs in an order of their own for each (seed, epoch); a last, smaller batch is left out unless it is all."""
    pairs.set_epoch(epoch)
    order = torch.Generator().manual_seed((args.seed << 20) + epoch)
    drop_last = len(pairs) >= args.batch_size
    return DataLoader(pairs, args.batch_size, shuffle=True, generator=order, drop_last=drop_last)


def train_step(run: Run, image_B3SS: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One update; return the loss, the gradient norm before clipping and the scale, each () and detached."""
    image, text, scale = run.model(image_B3SS, tokens_BT)
    loss = run.loss(normalize(image, dim=-1), normalize(text, dim=-1), scale)
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    limit = run.args.clip_grad_norm or math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), limit)
    run.optimizer.step()
    with torch.no_grad():
        run.model.logit_scale.clamp_(0, LARGEST_LOGIT_SCALE)
    run.step += 1
    return loss.detach(), grad_norm, scale.detach()


def train_epoch(
    run: Run, epoch: int, speed: SpeedCallBack, writer: SummaryWriter, display: Display, trace: Scalars
) -> Interval | None:
    """Train over the pairs once; return the last measured interval, None when the epoch is shorter than one."""
    last = None
    run.model.train()
    for image, tokens, _ in _batches(run.pairs, run.args, epoch=epoch):
        learning_rate = float(run.scheduler.get_last_lr()[0])
        loss, grad_norm, scale = train_step(run, image, tokens)
        run.scheduler.step()
        interval = speed(run.step, loss=loss, grad_norm=grad_norm, learning_rate=learning_rate, scale=scale)
        if interval is not None:
            last = interval
            _write_interval(writer, interval, learning_rate, float(scale))
            trace.scalar("loss", interval.loss)
        display.advance(None if interval is None else f"loss {interval.loss:.3f}")
    return last


def _write_interval(writer: SummaryWriter, interval: Interval, learning_rate: float, scale: float) -> None:
    """Points of the curves at this step: the mean loss of the interval, the rest as of its last step."""
    values = {
        "loss": interval.loss,
        "lr": learning_rate,
        "logit_scale": scale,
        "grad_norm": interval.grad_norm,
        "samples_per_second": interval.total_samples_per_second,
    }
    for name, value in values.items():
        writer.add_scalar(name, value, interval.step)
    writer.flush()


def evaluate(run: Run) -> float:
    """Return the zero-shot accuracy, in [0, 1], on the held-out pairs; leaves the model in eval mode."""
    run.model.eval()
    classes = class_embeddings(run.model, run.held_out.tokenizer, DIGIT_NAMES, CAPTION_TEMPLATES)
    loader: Batches = DataLoader(run.held_out, EVALUATION_BATCH)
    return zero_shot_accuracy(run.model, classes, ((image, label) for image, _, label in loader))


@contextlib.contextmanager
def _trace(run: Run) -> Iterator[Scalars]:
    """The trace of the run; ``--trace`` is the only thing that imports tracehooks."""
    if run.args.trace is None:
        yield Untraced()
        return
    try:
        import tracehooks
    except ImportError as error:
        raise InputError("--trace needs the package tracehooks: pip install tracehooks") from error
    try:
        trace = tracehooks.attach(run.model, run.args.trace, optimizer=run.optimizer, every=run.args.trace_every)
    except (OSError, ValueError) as error:
        raise InputError(f"--trace {run.args.trace}: {error}") from error
    with trace:
        yield trace


def _train(run: Run, display: Display, writer: SummaryWriter) -> tuple[float, float]:
    """Train all epochs; return the last interval's mean loss (nan for none) and the accuracy after the last epoch."""
    args = run.args
    batch = min(args.batch_size, len(run.pairs))
    speed = SpeedCallBack(args.frequent, run.steps_total, batch, logger=display.logger)
    loss = accuracy = math.nan
    with _trace(run) as trace:
        for epoch in range(args.epochs):
            interval = train_epoch(run, epoch, speed, writer, display, trace)
            loss = loss if interval is None else interval.loss
            with speed.paused():
                accuracy = evaluate(run)
                writer.add_scalar("zero_shot_accuracy", accuracy, run.step)
                trace.scalar("zero_shot_accuracy", accuracy)
                path = save_model(run.model, args.output, epoch)
            display.line(f"epoch:{epoch} zero-shot accuracy:{accuracy:.1%} saved:{path}")
    return loss, accuracy


def _summary(run: Run, loss: float, accuracy: float, seconds: float) -> str:
    """What came out and what to type next."""
    args = run.args
    share = max(1.0, min(args.batch_size, len(run.pairs)) / len(DIGIT_NAMES))
    least = f"about {math.log(share):.2f} is the least that a batch with {share:.1f} of each digit allows"
    lines = [
        f"trained {run.step} steps in {seconds:.0f} s",
        f"loss {loss:.3f} nats ({least})",
        f"zero-shot accuracy on {len(run.held_out)} held-out digits: {accuracy:.1%} (chance 10.0%)",
        f"checkpoints and log: {args.output}",
        f"curves: tensorboard --logdir {args.output / 'tensorboard'}",
    ]
    if args.trace is not None:
        lines += [
            f"trace: {args.trace} ({run.step} steps, every {args.trace_every} in full)",
            f"next: tracehooks show {args.trace}",
        ]
    return "\n".join(lines)


def _make_output(output: Path) -> None:
    """Make the output directory; a missing parent is taken for a slip of the pen."""
    try:
        output.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise InputError(f"--output {output}: the directory {output.parent} does not exist; make it first") from error
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 2 with one message on stderr for input that does not fit."""
    try:
        args = parse_args(argv)
        torch.set_num_threads(args.threads)
        run = build(args)
        _make_output(args.output)
        from torch.utils.tensorboard import SummaryWriter

        started = time.monotonic()
        with show(args.output / "training.log", run.steps_total) as display:
            size = sum(parameter.numel() for parameter in run.model.parameters())
            display.line(f"{size:,} parameters, {len(run.pairs)} pairs, {run.steps_total} steps")
            with contextlib.closing(SummaryWriter(str(args.output / "tensorboard"))) as writer:
                loss, accuracy = _train(run, display, writer)
            display.line(_summary(run, loss, accuracy, time.monotonic() - started))
    except InputError as error:
        print(f"rwkv_clip.train: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
