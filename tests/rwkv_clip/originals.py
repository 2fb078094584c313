"""The original's numbers, and the models and inputs that they were taken from; ``oracle/README.md`` describes both."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from rwkv_clip import ClipLoss, ModelConfig, load_model_configs
from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.training.optimizer import make_optimizer
from rwkv_clip.training.precision import make_scaler
from rwkv_clip.training.schedule import Schedule
from rwkv_clip.training.update import Updater

ORACLE = Path(__file__).parent / "oracle"
WEIGHT_SEED, INPUT_SEED = 20240611, 20240612


def read(name: str) -> Any:
    """Read a file: a dict of arrays from .npz, plain values from .json."""
    path = ORACLE / name
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def config_of(name: str) -> ModelConfig:
    """Read one of the configurations that the original was run with."""
    return load_model_configs(ORACLE / "configs" / f"{name}.json")


def model_of(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> RWKVCLIP:
    """Build one of them with the weights that it was run with, in eval mode."""
    model = RWKVCLIP(dataclasses.replace(config_of(name), **changes))
    weights = generated_weights({key: tuple(value.shape) for key, value in model.state_dict().items()})
    model.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
    return model.to(dtype).eval()


def inputs_of(name: str, batch: int = 4) -> tuple[Tensor, Tensor]:
    """Images (batch, 3, S, S) float32 and tokens (batch, T) that a configuration was run with."""
    config, random = config_of(name), np.random.RandomState(INPUT_SEED)
    image = 4 * random.random_sample((batch, 3, config.input_size, config.input_size)) - 2
    tokens = random.randint(0, config.vocab_size, (batch, config.ctx_len))
    for b in range(batch):
        tokens[b, max(2, config.ctx_len - 2 * b) :] = 0
    return torch.from_numpy(image.astype(np.float32)), torch.from_numpy(tokens.astype(np.int64))


def generated_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """The weights that the original was run with, float32, made from their names and shapes."""
    weights = {}
    for name, shape in shapes.items():
        seed = zlib.crc32(name.encode()) ^ WEIGHT_SEED
        centre, spread = weight_range(name, shape)
        value = centre + spread * (2 * np.random.RandomState(seed).random_sample(tuple(shape)) - 1)
        if name.endswith(("time_decay", "time_faaaa")):
            value = np.round(value * 32) / 32
        weights[name] = np.asarray(value, dtype=np.float32)
    return weights


def weight_range(name: str, shape: Sequence[int]) -> tuple[float, float]:
    """Centre and spread of a generated weight."""
    last = name.rsplit(".", 1)[-1]
    if name == "logit_scale":
        return math.log(1 / 0.07), 0.0
    if last in ("cls_token", "pos_embed"):
        return 0.0, 0.5
    if name.endswith("emb.weight"):
        return 0.0, 1.0
    if ".ln" in f".{name}" and last in ("weight", "bias"):
        return (1.0, 0.25) if last == "weight" else (0.0, 0.1)
    if last in ("time_maa_w1", "time_decay_w1"):
        return 0.0, math.sqrt(3 / shape[0])
    if last in ("time_maa_w2", "time_decay_w2"):
        return 0.0, 0.1
    if last.startswith(("time_maa", "spatial_mix")):
        return 0.5, 0.5
    if last == "time_decay":
        return -1.5, 2.0
    if last == "time_faaaa":
        return 0.0, 0.75
    return (0.0, math.sqrt(3 / math.prod(shape[1:]))) if last == "weight" else (0.0, 0.1)


def forward(model: RWKVCLIP, image: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Features, logits and loss as recorded: the loss compares unit vectors."""
    image_features, text_features, scale = model(image, tokens)
    unit_image, unit_text = normalize(image_features, dim=-1), normalize(text_features, dim=-1)
    return {
        "image_features": image_features,
        "text_features": text_features,
        "logit_scale": scale,
        "logits": scale * unit_image @ unit_text.T,
        "loss": ClipLoss()(unit_image, unit_text, scale),
    }


def gradient_digests(model: RWKVCLIP, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Of each parameter's gradient its norm, its product with the parameter and its first eight entries, as recorded."""
    parameters = dict(model.named_parameters())
    rows: dict[str, list[Any]] = {"grad_l2": [], "grad_dot_param": [], "grad_first8": []}
    for name in names:
        value, gradient = parameters[name].detach(), parameters[name].grad
        assert gradient is not None
        rows["grad_l2"].append(float(gradient.norm()))
        rows["grad_dot_param"].append(float((gradient * value).sum()))
        first = gradient.flatten()[:8].numpy()
        rows["grad_first8"].append(np.pad(first, (0, 8 - len(first))))
    return {key: np.asarray(row) for key, row in rows.items()}


def module_outputs(model: RWKVCLIP, image: Tensor, tokens: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """What each of these modules returns, as recorded: the patches as rows."""
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name in names:
            module.register_forward_hook(lambda _, __, output, name=name: seen.setdefault(name, output.detach()))
    model(image, tokens)
    seen["image_model.patch_embed"] = seen["image_model.patch_embed"].flatten(2).mT
    return seen


def replay_trace() -> dict[str, np.ndarray]:
    """Train as ``trace_cosine.npz`` was: what each of the 19 steps gives, and the norms of the weights after the last."""
    model = model_of("tiny").train()
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.2, decay_all=True)
    scaler = make_scaler("fp32", torch.device("cpu"), init_scale=1.0, growth_interval=1)
    update = Updater(model, optimizer, scaler, ClipLoss(), clip_grad_norm=1.0)
    schedule = Schedule(1e-3, 20, 0.1, cycle_momentum=True)
    image, tokens = inputs_of("tiny")
    rows = []
    for step in range(19):
        schedule.apply(optimizer, step)
        (group,) = optimizer.param_groups
        outcome = update([(image.double(), tokens)])
        rows.append(
            {
                "loss": float(outcome.loss),
                "gnorm": float(outcome.grad_norm),
                "scale_logged": float(outcome.scale),
                "logit_scale_after": float(model.logit_scale.detach()),
                "lr_used": group["lr"],
                "beta1_used": group["betas"][0],
            }
        )
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    state = model.state_dict()
    norms = [float(state[name].norm()) for name in read("trace_cosine.npz")["param_names"]]
    return columns | {"param_l2_end": np.array(norms)}


LOSSES: dict[str, dict[str, bool]] = {
    "": {},
    "--gather-with-grad": {"gather_with_grad": True},
    "--gather-with-grad --local-loss": {"gather_with_grad": True, "local_loss": True},
}
"""Kinds of loss over several processes, by their flags."""


def loss_and_gradients(image: Tensor, text: Tensor, **options: bool) -> list[Tensor]:
    """ClipLoss of this rank's features at scale 5, and the gradients of image, text and scale, as in ``dist_loss.npz``."""
    leaves = [x.clone().requires_grad_() for x in (image, text, torch.tensor(5.0, dtype=torch.float64))]
    loss = ClipLoss(**options)(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]
