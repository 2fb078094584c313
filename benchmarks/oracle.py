"""How far this implementation is from the original's recorded numbers: the largest error of each file.

    python -m benchmarks.oracle [--without B32]

The files are those of tests/rwkv_clip/oracle. An error is the largest difference relative to the array's largest value
(at least 1); of gradient norms in float32 and of statistics it is relative to each value; of names and token ids it is how
many differ. Each line has the error that is allowed; when one is larger the exit status is 1. B/32 in float64 takes
three gigabytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ftfy
import numpy as np
import torch

from benchmarks.machine import describe_machine
from rwkv_clip import create_RWKV_Model, load_model_configs
from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.tokenizer import BytePairTokenizer, find_vocabulary
from rwkv_clip.training.distributed import joined
from rwkv_clip.training.schedule import learning_rate_factor
from tests import launching
from tests.rwkv_clip import originals
from tests.rwkv_clip.wkv.cases import CASES, RESULTS, output_and_gradients, recorded_case

FEATURES = ("image_features", "text_features", "logits", "loss")
DIGESTS = ("grad_l2", "grad_dot_param", "grad_first8")
BFLOAT16_STORED = (".time_decay", ".time_faaaa")
DTYPES = {"f32": torch.float32, "f64": torch.float64}


class Agreement(NamedTuple):
    """What of a file is compared."""

    file: str
    what: str
    allowed: float
    error: Callable[[], float]


def error(seen: Mapping[str, Any], expected: Mapping[str, Any], names: tuple[str, ...] = ()) -> float:
    """Largest difference of the named arrays (all by default), relative to the largest value of each, at least 1."""
    pairs = [(np.asarray(seen[name]), np.asarray(expected[name])) for name in names or expected]
    return largest(np.abs(a - b).max() / max(1.0, np.abs(b).max()) for a, b in pairs)


def largest(errors: Iterable[float]) -> float:
    """The largest, NaN if one is."""
    return float(np.max([float(error) for error in errors]))


@functools.cache
def passed(config: str, precision: str) -> dict[str, np.ndarray]:
    """Features, logits, loss and gradient digests of a configuration with its recorded weights and inputs."""
    model = originals.model_of(config, DTYPES[precision])
    image, tokens = originals.inputs_of(config)
    seen = originals.forward(model, image.to(DTYPES[precision]), tokens)
    seen["loss"].backward()
    names = originals.read(f"{config}_f64.npz")["grad_names"]
    return {name: value.detach().numpy() for name, value in seen.items()} | originals.gradient_digests(model, names)


def features(config: str, precision: str) -> float:
    """Error of features, logits and loss."""
    return error(passed(config, precision), originals.read(f"{config}_{precision}.npz"), FEATURES)


def gradients(config: str, precision: str) -> float:
    """Error of the gradients' digests in float64; in float32 the relative error of their norms from float64's."""
    seen, recorded = passed(config, precision), originals.read(f"{config}_f64.npz")
    if precision == "f64":
        return error(seen, recorded, DIGESTS)
    return float(np.abs(seen["grad_l2"] / recorded["grad_l2"] - 1).max())


def names_that_differ(keys: str, config: str) -> float:
    """Entries of the state dict whose name or shape is not the original's."""
    with torch.device("meta"):
        model = RWKVCLIP(load_model_configs(config) if config.startswith("RWKV") else originals.config_of(config))
    seen = {(name, tuple(value.shape)) for name, value in model.state_dict().items()}
    return float(len(seen ^ {(name, tuple(entry["shape"])) for name, entry in originals.read(keys).items()}))


def modules() -> float:
    """Error of what every module returns."""
    recorded, (image, tokens) = originals.read("tiny_intermediate.npz"), originals.inputs_of("tiny")
    return error(originals.module_outputs(originals.model_of("tiny"), image.double(), tokens, list(recorded)), recorded)


def recurrence(engine: str) -> float:
    """Error of the WKV operator's output and five gradients over all cases."""
    recorded = originals.read("wkv_cases.npz")
    errors = []
    for case in CASES:
        inputs, expected = recorded_case(recorded, case, torch.float64)
        seen = dict(zip(RESULTS, output_and_gradients(inputs, engine), strict=True))
        errors.append(error(seen, dict(zip(RESULTS, expected, strict=True))))
    return largest(errors)


def _losses(image: torch.Tensor, text: torch.Tensor, folder: str) -> None:
    """On each rank: every kind of loss of its own features, and its gradients."""
    with joined("cpu") as place:
        results = {
            flags: originals.loss_and_gradients(image[place.rank], text[place.rank], **options)
            for flags, options in originals.LOSSES.items()
        }
        torch.save(results, f"{folder}/{place.rank}.pt")


def two_ranks() -> float:
    """Error of the loss of two ranks and of the gradients that they average to, from the single process's."""
    recorded = originals.read("dist_loss.npz")
    names = ("loss", "g_image", "g_text", "g_scale")
    expected = {name: recorded[f"single/{name}"] for name in names}
    image, text = (torch.from_numpy(recorded[name]) for name in ("image", "text"))
    with tempfile.TemporaryDirectory() as folder:
        launching.run(_losses, image, text, folder, ranks=len(image), log=Path(folder) / "log")
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(len(image))]
    errors = []
    for flags in originals.LOSSES:
        loss, of_image, of_text, of_scale = (
            torch.stack(parts) for parts in zip(*(r[flags] for r in ranks), strict=True)
        )
        averaged = (
            loss.mean(),
            of_image.flatten(0, 1) / len(ranks),
            of_text.flatten(0, 1) / len(ranks),
            of_scale.mean(),
        )
        errors.append(error(dict(zip(names, averaged, strict=True)), expected))
    return largest(errors)


def rates() -> float:
    """Error of the learning rate at each step."""
    recorded = originals.read("onecycle.json")
    total, steps = recorded["steps_per_epoch"] * recorded["epochs"], recorded["lr_beta1_by_step"]
    return max(
        abs(recorded["max_lr"] * learning_rate_factor(step, total, warmup=recorded["pct_start"], shape="cosine") - rate)
        for step, (rate, _) in enumerate(steps[:total])
    )


@functools.cache
def initial_weights() -> dict[str, torch.Tensor]:
    """The tiny model as it starts to train."""
    torch.manual_seed(0)
    return create_RWKV_Model(dataclasses.replace(originals.config_of("tiny"), text_initialization=True)).state_dict()


def fixed_weights(*, rounded: bool) -> float:
    """Error of the initial weights that no random number enters, of those that the original keeps in bfloat16 or others."""
    recorded = originals.read("init_tiny_fp32_det.npz")
    names = [n for n in recorded if rounded == (n.startswith("text_model") and n.endswith(BFLOAT16_STORED))]
    return error(initial_weights(), recorded, tuple(names))


def spread_of_weights() -> float:
    """Relative error of each initial weight's standard deviation; the random numbers are others."""
    statistics = originals.read("init_tiny_fp32.json")
    pairs = [(float(initial_weights()[n].std(unbiased=False)), entry["std"]) for n, entry in statistics.items()]
    return max(abs(seen - expected) / expected if expected > 1e-7 else seen for seen, expected in pairs)


def token_ids() -> float:
    """Ids that differ, over all strings."""
    recorded = originals.read("tokens.json")
    tokenizer = BytePairTokenizer(find_vocabulary(), repair=ftfy.fix_text)
    rows = [
        (tokenizer(case["text"], recorded["context_length"])[0].tolist(), case["ids"]) for case in recorded["cases"]
    ]
    return float(sum(a != b for seen, expected in rows for a, b in zip(seen, expected, strict=True)))


def trace() -> float:
    """Error of loss, gradient norm, scale, rate and first beta of 19 training steps, and of the weights after them."""
    seen = originals.replay_trace()
    return error(seen, originals.read("trace_cosine.npz"), tuple(seen))


NAMES = "names or shapes that differ"
FEATURES_SAID = "features, logits, loss"
AGREEMENTS = (
    Agreement("tiny_keys.json", NAMES, 0, lambda: names_that_differ("tiny_keys.json", "tiny")),
    Agreement("tiny_cls_keys.json", NAMES, 0, lambda: names_that_differ("tiny_cls_keys.json", "tiny_cls")),
    Agreement("B16_keys.json", NAMES, 0, lambda: names_that_differ("B16_keys.json", "RWKV_CLIP_B16")),
    Agreement("B32_keys.json", NAMES, 0, lambda: names_that_differ("B32_keys.json", "RWKV_CLIP_B32")),
    Agreement("wkv_cases.npz", "reference engine, output and gradients", 1e-13, lambda: recurrence("reference")),
    Agreement("wkv_cases.npz", "chunked engine, output and gradients", 1e-13, lambda: recurrence("chunked")),
    Agreement("tiny_intermediate.npz", "what every module returns", 1e-12, modules),
    Agreement("tiny_f64.npz", FEATURES_SAID, 1e-12, lambda: features("tiny", "f64")),
    Agreement("tiny_f64.npz", "digests of all gradients", 1e-12, lambda: gradients("tiny", "f64")),
    Agreement("tiny_f64.npz", "norms of all gradients in float32, relative", 2e-3, lambda: gradients("tiny", "f32")),
    Agreement("tiny_f32.npz", FEATURES_SAID, 1e-5, lambda: features("tiny", "f32")),
    Agreement("B32_f64.npz", FEATURES_SAID, 1e-10, lambda: features("B32", "f64")),
    Agreement("B32_f64.npz", "digests of all gradients", 1e-10, lambda: gradients("B32", "f64")),
    Agreement("B32_f64.npz", "norms of all gradients in float32, relative", 2e-3, lambda: gradients("B32", "f32")),
    Agreement("B32_f32.npz", FEATURES_SAID, 1e-5, lambda: features("B32", "f32")),
    Agreement("dist_loss.npz", "loss and gradients of two ranks", 1e-12, two_ranks),
    Agreement("trace_cosine.npz", "19 training steps, and the weights after them", 1e-11, trace),
    Agreement("onecycle.json", "learning rate of 100 steps", 1e-15, rates),
    Agreement(
        "init_tiny_fp32_det.npz", "initial weights that are not random", 1e-6, lambda: fixed_weights(rounded=False)
    ),
    Agreement("init_tiny_fp32_det.npz", "those it keeps in bfloat16", 2**-8, lambda: fixed_weights(rounded=True)),
    Agreement("init_tiny_fp32.json", "deviations of initial weights, relative", 0.15, spread_of_weights),
    Agreement("tokens.json", "ids that differ", 0, token_ids),
)


def measure(without: str | None = None) -> Iterator[dict[str, Any]]:
    """A line for each agreement, except those of files whose name starts with ``without``."""
    for agreement in AGREEMENTS:
        if without is None or not agreement.file.startswith(f"{without}_f"):
            line = {"file": agreement.file, "what": agreement.what}
            yield line | {"largest_error": float(f"{agreement.error():.1e}"), "allowed": agreement.allowed}


def main() -> int:
    """Print the lines, the machine first; exit status 1 when an error is larger than allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--without", help="leave out the numbers of a configuration: B32")
    args = parser.parse_args()
    print(json.dumps(describe_machine()))
    lines = []
    for line in measure(args.without):
        lines.append(line)
        print(json.dumps(line), flush=True)
    wrong = [line for line in lines if not line["largest_error"] <= line["allowed"]]
    for line in wrong:
        print(
            f"{line['file']}, {line['what']}: {line['largest_error']} is not within {line['allowed']}", file=sys.stderr
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
