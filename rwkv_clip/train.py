"""Train an RWKV-CLIP: ``python -m rwkv_clip.train --data digits --output DIR``.

On one process, or on many with ``torchrun --nproc-per-node N -m rwkv_clip.train …``. ``--help`` lists the flags;
docs/rwkv_clip.md says what each does. What a run is made of lies in ``rwkv_clip/training``.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rwkv_clip.data.digits import CAPTION_TEMPLATES, DIGIT_NAMES, DigitPairs
from rwkv_clip.data.loading import Batch, in_order, load_steps
from rwkv_clip.data.pairs import Pairs
from rwkv_clip.errors import InputError
from rwkv_clip.evaluation import BATCH
from rwkv_clip.retrieval import retrieval_scores
from rwkv_clip.training.distributed import every_rank, joined
from rwkv_clip.training.flags import parse_args
from rwkv_clip.training.monitor import Curves, Scalars, curves, traced
from rwkv_clip.training.progress import Display, show
from rwkv_clip.training.resume import Position, clear_half_written, save
from rwkv_clip.training.run import Run, build, computing
from rwkv_clip.training.speed import Interval, SpeedCallBack
from rwkv_clip.training.stalls import watched
from rwkv_clip.training.update import Outcome
from rwkv_clip.wkv import EngineError
from rwkv_clip.zero_shot import class_embeddings, zero_shot_accuracy

__all__ = ["evaluate", "main", "train_epoch"]


@dataclasses.dataclass(slots=True)
class _Desk:
    """Where a run's progress is written down."""

    display: Display
    curves: Curves
    trace: Scalars
    speed: SpeedCallBack
    known: set[str] = dataclasses.field(default_factory=set)  # places of broken samples that were said

    def broken(self, run: Run, problems: Iterable[str]) -> None:
        """Say what is broken, once; raise InputError if the run is to stop at it."""
        for problem in problems:
            if run.args.on_broken == "stop":
                raise InputError(f"broken sample: {problem}")
            if problem not in self.known:
                self.known.add(problem)
                self.display.warn(f"skipped a broken sample: {problem}")

    def step(self, run: Run, outcome: Outcome, learning_rate: float, waited: float) -> Interval | None:
        """Count a step; at the end of an interval write it down everywhere."""
        amp = run.updater.scaler.get_scale() if run.step % run.args.frequent == 0 else 1.0
        interval = self.speed(
            run.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=learning_rate,
            scale=outcome.scale,
            amp=amp,
            skipped=outcome.skipped,
            waited=waited,
        )
        if interval is not None:
            self.curves.interval(interval, learning_rate=learning_rate, logit_scale=float(outcome.scale), amp=amp)
            self.trace.scalar("interval_loss", interval.loss)  # each step's own is recorded as loss
        self.display.advance(None if interval is None else f"loss {interval.loss:.3f}")
        return interval


def train_step(run: Run, batches: Sequence[Batch]) -> Outcome:
    """Make the run's next optimiser step of these micro-batches; its position moves on."""
    run.schedule.apply(run.updater.optimizer, run.step)
    device = run.place.device
    outcome = run.updater([(batch.image.to(device), batch.tokens.to(device)) for batch in batches])
    position = run.position
    run.position = Position(position.epoch, position.step + 1, position.skipped + outcome.skipped)
    run.phases.step_done()
    return outcome


def train_epoch(run: Run, desk: _Desk) -> Interval | None:
    """Train over what is left of the epoch; return the last measured interval, None when there was none."""
    last = None
    run.model.train()
    epoch, start = run.position.epoch, run.position.step
    waited = run.phases.seconds["gather"]
    run.phases.enter("data")
    for batches in load_steps(run.pairs, run.plan, epoch, start=start, workers=run.args.workers):
        desk.broken(run, (problem for batch in batches for problem in batch.broken))
        learning_rate = run.schedule.learning_rate(run.step)
        outcome = train_step(run, batches)
        run.phases.enter("report")
        waiting, waited = run.phases.seconds["gather"] - waited, run.phases.seconds["gather"]
        last = desk.step(run, outcome, learning_rate, waiting if run.place.world > 1 else 0.0) or last
        if run.args.save_every and run.step % run.args.save_every == 0 and run.position.step < run.plan.steps:
            with desk.speed.paused():
                run.phases.enter("save")
                save(run, run.position)
        run.phases.enter("data")
    run.position = Position(epoch + 1, 0, run.position.skipped)
    return last


def evaluate(run: Run, note: Callable[[list[str]], None] = lambda _: None) -> dict[str, float]:
    """Return named scores, in [0, 1], on the held-out pairs, none where there are none; leaves the model in eval mode.

    Zero-shot accuracy on the digits, recall at 1, 5 and 10 on other data. Each rank computes a share, and all must call
    it. ``note`` is told before each batch which images of it are left out.
    """
    run.model.eval()
    if run.held_out is None:
        return {}

    def going_on(broken: list[str]) -> None:
        run.phases.enter("evaluate")  # a long evaluation is not a rank that has stopped
        note(broken)

    def batches(pairs: Pairs) -> Iterator[Batch]:
        for batch in in_order(pairs, BATCH, rank=run.place.rank, world=run.place.world):
            going_on(batch.broken)
            yield batch

    if isinstance(run.held_out, DigitPairs):
        classes = class_embeddings(run.bare, run.held_out.tokenizer, DIGIT_NAMES, CAPTION_TEMPLATES)
        accuracy = zero_shot_accuracy(run.bare, classes, batches(run.held_out), place=run.place)
        return {"zero_shot_accuracy": accuracy}
    return retrieval_scores(run.bare, run.held_out, place=run.place, workers=run.args.workers, note=going_on)


def _train(run: Run, desk: _Desk) -> tuple[float | None, dict[str, float]]:
    """Train all epochs; return the last interval's mean loss (None for none) and the scores after the last epoch."""
    loss, scores = None, dict[str, float]()
    while run.position.epoch < run.args.epochs:
        epoch = run.position.epoch
        interval = train_epoch(run, desk)
        loss = loss if interval is None else interval.loss
        with desk.speed.paused():
            run.phases.enter("evaluate")
            scores = evaluate(run, partial(desk.broken, run))
            desk.curves.points(run.step, scores)
            for name, score in scores.items():
                desk.trace.scalar(name, score)
            run.phases.enter("save")
            path = save(run, run.position)
            every_rank(None, run.place)
        said = "".join(f" {name.replace('_', '-')}:{score:.1%}" for name, score in scores.items())
        desk.display.line(f"epoch:{epoch}{said} saved:{path}")
    return loss, scores


def _summary(run: Run, steps: int, loss: float | None, scores: dict[str, float], seconds: float) -> str:
    """What came out of these steps and what to type next."""
    args = run.args
    lines = [f"trained {steps} steps in {seconds:.0f} s" if steps else f"all {args.epochs} epochs were done before"]
    lines += [f"loss {loss:.3f} nats{_least_loss(run)}"] if loss is not None else []
    lines += [f"{_score_name(run, name)}: {score:.1%}" for name, score in scores.items()]
    lines += [
        f"checkpoints and log: {args.output}",
        f"curves: tensorboard --logdir {args.output / 'tensorboard'}",
    ]
    if args.trace is not None:
        lines += [
            f"trace: {args.trace} ({run.step} steps, every {args.trace_every} in full)",
            f"next: tracehooks show {args.trace}",
        ]
    return "\n".join(lines)


def _least_loss(run: Run) -> str:
    if not isinstance(run.pairs, DigitPairs):
        return ""
    share = max(1.0, run.plan.pairs_a_step / len(DIGIT_NAMES))
    return f" (about {math.log(share):.2f} is the least that a batch with {share:.1f} of each digit allows)"


def _score_name(run: Run, name: str) -> str:
    if name == "zero_shot_accuracy":
        return f"zero-shot accuracy on {len(run.held_out or ())} held-out digits (chance 10.0%)"
    return name.replace("_", " ")


def _make_output(output: Path) -> None:
    """Make the output directory; a missing parent is taken for a slip of the pen."""
    try:
        output.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise InputError(f"--output {output}: the directory {output.parent} does not exist; make it first") from error
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}") from error


def _introduce(run: Run, display: Display) -> None:
    size = sum(parameter.numel() for parameter in run.bare.parameters())
    processes = "" if run.place.world == 1 else f", process {run.place.rank} of {run.place.world}"
    display.line(f"{size:,} parameters, {len(run.pairs)} pairs, {run.steps_total} steps{processes}")
    for note in run.notes:
        display.line(note)
    say = display.warn if run.place.leads else display.line  # every rank finds the same
    for problem in (problem for pairs in (run.pairs, run.held_out) if pairs for problem in pairs.problems):
        if run.args.on_broken == "stop":
            raise InputError(f"broken row: {problem}")
        say(f"left out a broken row: {problem}")


def _work(run: Run) -> None:
    """Train, showing and keeping what there is to see."""
    args, place = run.args, run.place
    if place.leads:
        clear_half_written(args.output)
    log = args.output / ("training.log" if place.leads else f"training.rank{place.rank}.log")
    started, before = time.monotonic(), run.step
    with show(log, run.steps_total, done=run.step, console=place.leads) as display:
        _introduce(run, display)
        with watched(place, run.phases, args.stall_timeout, display.warn), curves(run) as drawn, traced(run) as trace:
            speed = SpeedCallBack(
                args.frequent,
                run.steps_total,
                run.plan.batch * run.plan.micro_batches,
                gather=lambda own: every_rank(own, place),
                skipped=run.position.skipped,
                logger=display.logger,
            )
            loss, scores = _train(run, _Desk(display, drawn, trace, speed))
            run.phases.enter("done")
            every_rank(None, place)
        display.line(_summary(run, run.step - before, loss, scores, time.monotonic() - started))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 2 with one message on stderr for input that does not fit."""
    try:
        args = parse_args(argv)
        with computing(args), joined(args.device) as place:
            run = build(args, place)
            _make_output(args.output)
            _work(run)
    except (InputError, EngineError) as error:
        print(f"rwkv_clip.train: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
