"""Everything one training run is made of, and putting it together from the command line's flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from rwkv_clip.checkpoint import load_model_weight
from rwkv_clip.clip import RWKVCLIP, get_model_RWKV_CLIP
from rwkv_clip.config import ModelConfig
from rwkv_clip.data import open_pairs
from rwkv_clip.data.loading import Plan
from rwkv_clip.data.pairs import Pairs, Split
from rwkv_clip.errors import InputError, nearest
from rwkv_clip.loss import ClipLoss
from rwkv_clip.training.distributed import Place, replicate, shard
from rwkv_clip.training.optimizer import make_optimizer
from rwkv_clip.training.precision import make_scaler, matrix_products
from rwkv_clip.training.randomness import deterministic, seed_everything
from rwkv_clip.training.resume import Checkpoint, Position, find_checkpoint, holds_checkpoints, restore
from rwkv_clip.training.schedule import Schedule
from rwkv_clip.training.stalls import Phases
from rwkv_clip.training.update import Updater

__all__ = ["Run", "build", "computing"]


@dataclass(slots=True)
class Run:
    """Everything one training run is made of."""

    args: argparse.Namespace
    place: Place
    model: nn.Module  # as it trains: in DistributedDataParallel, sharded, or bare
    bare: RWKVCLIP
    pairs: Pairs
    held_out: Pairs | None
    plan: Plan
    schedule: Schedule
    updater: Updater
    phases: Phases
    position: Position = field(default_factory=Position)
    notes: list[str] = field(default_factory=list)  # what the user should know before it starts

    @property
    def steps_total(self) -> int:
        """Optimiser steps of the whole run."""
        return self.schedule.total

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.position.epoch * self.plan.steps + self.position.step


@contextmanager
def computing(args: argparse.Namespace) -> Iterator[None]:
    """The process-wide settings of torch that the flags ask for; undone afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with matrix_products(args.precision), deterministic(args.deterministic):
            yield
    finally:
        torch.set_num_threads(threads)


def build(args: argparse.Namespace, place: Place) -> Run:
    """Make the model, the data and the optimiser of a run, or of the one that ``--resume`` names. Seeds all generators.

    Raises:
        InputError: for data that cannot be read, a model that does not fit it, or a checkpoint that does not fit.
    """
    checkpoint = _checkpoint(args)
    seed_everything(args.seed)
    bare = get_model_RWKV_CLIP(args)
    if checkpoint is not None or args.model_weight_path is not None:
        load_model_weight(bare, args.model_weight_path if checkpoint is None else checkpoint.model)
    pairs, held_out = _open(args, bare.config, "train"), _open_held_out(args, bare.config)
    plan = Plan(len(pairs), args.batch_size, args.seed, args.gradient_acc, place.rank, place.world)
    model = _spread(bare.to(place.device), args, place)
    phases = Phases()
    run = Run(
        args,
        place,
        model,
        bare,
        pairs,
        held_out,
        plan,
        _schedule(args, plan),
        _updater(args, place, model, phases),
        phases,
    )
    seed_everything(args.seed, place.rank)
    if checkpoint is not None:
        run.position = checkpoint.position(plan.pairs_a_step)
        run.notes.append(f"going on from {checkpoint.model}: epoch {run.position.epoch}, step {run.step}")
        changed = restore(checkpoint, run)
        if changed:
            run.notes.append(f"not the run that was saved, settings differ: {', '.join(changed)}")
    elif args.resume is not None:
        run.notes.append(f"no checkpoint in {args.output} yet: starting anew")
    return run


def _checkpoint(args: argparse.Namespace) -> Checkpoint | None:
    if args.resume is not None:
        return find_checkpoint(args.resume, args.output)
    if holds_checkpoints(args.output):
        raise InputError(
            f"--output {args.output} holds the checkpoints of a run: --resume latest goes on with it, another "
            "directory begins a new one"
        )
    return None


def _open(args: argparse.Namespace, config: ModelConfig, split: Split) -> Pairs:
    return open_pairs(
        args.data if split == "train" else args.val_data, config, split,
        seed=args.seed,
        limit=args.train_num_samples if split == "train" else None,
        vocabulary=args.vocabulary,
        image_column=args.image_column,
        caption_columns=tuple(args.caption_columns),
        augment=not args.no_augment,
    )  # fmt: skip


def _open_held_out(args: argparse.Namespace, config: ModelConfig) -> Pairs | None:
    if args.val_data is None and args.data == "digits":
        return open_pairs("digits", config, "held-out", seed=args.seed)
    return None if args.val_data is None else _open(args, config, "held-out")


def _spread(bare: RWKVCLIP, args: argparse.Namespace, place: Place) -> nn.Module:
    if args.wkv_engine == "cuda" and place.device.type != "cuda":
        raise InputError(f"--wkv-engine cuda: the model is on {place.device}; auto takes what fits")
    if args.compile is not None:
        backends = torch.compiler.list_backends(exclude_tags=())
        if args.compile not in backends:
            raise InputError(f"--compile {args.compile}: no such backend{nearest(args.compile, backends)}")
        bare.compile(backend=args.compile)
    if not args.fsdp:
        return replicate(bare, place)
    if place.world == 1:
        raise InputError("--fsdp spreads the model over several processes: start them with torchrun")
    return shard(bare, place)


def _schedule(args: argparse.Namespace, plan: Plan) -> Schedule:
    return Schedule(args.lr, args.epochs * plan.steps, args.warmup, args.lr_scheduler, args.cycle_momentum)


def _updater(args: argparse.Namespace, place: Place, model: nn.Module, phases: Phases) -> Updater:
    optimizer = make_optimizer(
        model, lr=args.lr, betas=(args.beta1, args.beta2), weight_decay=args.weight_decay, decay_all=args.decay_all
    )
    scaler = make_scaler(args.precision, place.device, init_scale=args.init_scale, growth_interval=args.growth_interval)
    loss = ClipLoss(local_loss=args.local_loss, gather_with_grad=args.gather_with_grad)
    return Updater(model, optimizer, scaler, loss, args.precision, args.clip_grad_norm, phases.enter)
