"""A small MusicGen trained on tones under captions, with a probe at each of the sixteen boundaries of its training step.

The model is transformers' own, from a small configuration; the tones are made here, so nothing is downloaded. The step
follows the solver of AudioCraft, whose boundaries are numbered in the comments. ``--fault`` plants one of four mistakes.

    python examples/musicgen.py --trace runs/healthy
    python examples/musicgen.py --trace runs/inverted --fault inverted-mask
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    EncodecConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    T5Config,
)

import tracehooks

FAULTS = ("none", "inverted-mask", "dropped-captions", "clip-on-scaled", "misaligned-codebook")
WORDS = ("<pad>", "low", "middle", "high", "soft", "loud", "steady", "beating")
PITCHES, LEVELS = {"low": 60.0, "middle": 120.0, "high": 240.0}, {"soft": 0.2, "loud": 0.6}
RATE, SECONDS, CODEBOOKS, CODES = 1600, 1.0, 4, 32
START = CODES
"""The id that decoding starts with and that stands for padding: one above the codes."""
NOISE = 0.03


@dataclass
class Example:
    """A tone and what it is called."""

    wave: Tensor
    caption: list[str]


def examples(count: int, generator: torch.Generator) -> list[Example]:
    """Tones of different pitch, level and length; every second one fills its second."""
    made = []
    for i in range(count):
        pitch, level = (
            list(names)[int(torch.randint(len(names), (), generator=generator))] for names in (PITCHES, LEVELS)
        )
        beating = bool(torch.randint(2, (), generator=generator))
        seconds = SECONDS if i % 2 else SECONDS * (0.4 + 0.4 * float(torch.rand((), generator=generator)))
        time = torch.arange(int(RATE * seconds)) / RATE
        wave = LEVELS[level] * torch.sin(2 * math.pi * PITCHES[pitch] * (time + time**2))  # a tone that rises
        if beating:
            wave = wave * (1 + torch.sin(2 * math.pi * 8 * time)) / 2
        wave = wave + NOISE * torch.randn(len(wave), generator=generator)
        made.append(Example(wave, [pitch, level, "beating" if beating else "steady"]))
    return made


def build(seed: int = 0) -> MusicgenForConditionalGeneration:
    """A MusicGen of some 80,000 parameters; text encoder and codec are frozen, as they are where they come trained."""
    torch.manual_seed(seed)
    text = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2)
    codec = EncodecConfig(
        sampling_rate=RATE, num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=CODES, num_lstm_layers=1,
        upsampling_ratios=[5, 4, 2], target_bandwidths=[0.8],
    )  # fmt: skip
    decoder = MusicgenDecoderConfig(
        vocab_size=CODES + 1, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64,
        num_codebooks=CODEBOOKS, pad_token_id=START, bos_token_id=START, max_position_embeddings=128, dropout=0.0,
    )  # fmt: skip
    model = MusicgenForConditionalGeneration(
        MusicgenConfig(text_encoder=text.to_dict(), audio_encoder=codec.to_dict(), decoder=decoder.to_dict())
    )
    for frozen in (model.text_encoder, model.audio_encoder):
        frozen.requires_grad_(False)
    return model


@torch.no_grad()
def fit_codebooks(model: MusicgenForConditionalGeneration, data: list[Example], generator: torch.Generator) -> None:
    """Codes for an untrained codec, which has one for everything: each codebook holds some frames of the data, less what
    the codebooks before it say of them."""
    waves = nn.utils.rnn.pad_sequence([example.wave for example in data], batch_first=True)
    rest = model.audio_encoder.encoder(waves[:, None]).transpose(1, 2).flatten(0, 1)
    for layer in model.audio_encoder.quantizer.layers:
        layer.codebook.embed.copy_(rest[torch.randperm(len(rest), generator=generator)[:CODES]])
        rest = rest - layer.codebook.embed[torch.cdist(rest, layer.codebook.embed).argmin(1)]


def conditions(batch: list[Example], fault: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids of the captions, and which of their words there are: each of shape (batch, words)."""
    captions = [example.caption for example in batch]  # 2: metadata as condition attributes
    dropped = 1.0 if fault == "dropped-captions" else 0.1  # 3: classifier-free dropout of whole captions
    kept = tracehooks.mask(torch.rand(len(captions), generator=generator) >= dropped, "caption_kept")
    words = [caption if keep else [] for caption, keep in zip(captions, kept.tolist(), strict=True)]
    ids = torch.tensor([[WORDS.index(word) for word in caption] + [0] * (3 - len(caption)) for caption in words])  # 4
    return tracehooks.tokens(ids, "caption", vocab_size=len(WORDS), pad=0), ids != 0


def codes_of(model: MusicgenForConditionalGeneration, batch: list[Example], fault: str) -> tuple[Tensor, Tensor]:
    """Codec tokens of shape (batch, codebooks, frames), and which frames hold audio: (batch, frames)."""
    waves = nn.utils.rnn.pad_sequence([example.wave for example in batch], batch_first=True)
    tracehooks.audio(waves[:, None], "wave", sample_rate=RATE)
    with torch.no_grad():
        (codes,) = model.audio_encoder.encode(waves[:, None]).audio_codes  # 5
    rate = model.audio_encoder.config.frame_rate
    frames = torch.tensor([math.ceil(len(example.wave) / RATE * rate) for example in batch])
    valid = torch.arange(codes.shape[-1]) < frames[:, None]  # 6: padding mask from valid lengths
    tracehooks.tokens(codes.masked_fill(~valid[:, None], START), "codes", vocab_size=CODES, pad=START)
    if fault == "inverted-mask":
        valid = ~valid
    return codes, tracehooks.mask(valid, "valid")


def masked_cross_entropy(logits: list[Tensor], targets: Tensor, valid: Tensor) -> list[Tensor]:
    """Cross-entropy of each codebook over valid frames (9). logits: (batch, frames, codes) each, targets (batch, codebooks,
    frames), valid (batch, frames)."""
    losses = []
    for k, scores in enumerate(logits):
        wanted = targets[:, k]
        tracehooks.tokens(wanted.masked_fill(~valid, START), f"targets.{k}", vocab_size=CODES, pad=START)
        assert scores.shape[:2] == wanted.shape == valid.shape, (scores.shape, wanted.shape, valid.shape)  # 8: shapes
        losses.append(nn.functional.cross_entropy(scores[valid].float(), wanted[valid]))
    return losses


def step(
    model: MusicgenForConditionalGeneration,
    batch: list[Example],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    trace: tracehooks.Trace,
    fault: str,
    generator: torch.Generator,
) -> float:
    """One training step; its loss."""
    trace.scalar("music/audio", len(batch))  # 1: as many signals as metadata
    trace.scalar("music/metadata", sum(bool(example.caption) for example in batch))
    ids, present = conditions(batch, fault, generator)
    codes, valid = codes_of(model, batch, fault)
    targets = codes.clone()
    if fault == "misaligned-codebook":
        targets[:, 2] = targets[:, 2].roll(1, 0)
    given = torch.cat([torch.full_like(codes[..., :1], START), codes[..., :-1]], -1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=ids, attention_mask=present.long(), decoder_input_ids=given.flatten(0, 1), use_cache=False
        ).logits
    by_codebook = logits.unflatten(0, (len(batch), CODEBOOKS))[..., :CODES].unbind(1)
    probed = [tracehooks.probe(scores, f"logits.{k}") for k, scores in enumerate(by_codebook)]  # 7: of each codebook
    losses = masked_cross_entropy(probed, targets, valid)
    loss = torch.stack(losses).mean()
    scaler.scale(loss).backward()  # 10: gradients
    if fault != "clip-on-scaled":
        scaler.unscale_(optimizer)  # 11
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # 12
    scaler.step(optimizer)  # 13
    scaler.update()
    schedule.step()
    optimizer.zero_grad()  # 14; 15, the guard against a loss that is not finite, is attach's on_nonfinite="raise"
    for k, value in enumerate(losses):
        trace.scalar(f"cross_entropy/{k}", value.detach())  # 16: of each codebook, and perplexity
        trace.scalar(f"perplexity/{k}", value.detach().exp())
    return float(loss.detach())


def main(argv: list[str] | None = None) -> int:
    """Train, and say the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, required=True, help="directory of the trace")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="the mistake to plant")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args(argv)
    generator = torch.Generator().manual_seed(0)
    data = examples(4 * args.batch, generator)
    model = build()
    fit_codebooks(model, data, generator)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with tracehooks.attach(
        model, args.trace, exclude="audio_encoder*", on_nonfinite="raise", quiet=True, sketch=True
    ) as trace:
        for i in range(args.steps):
            order = torch.randperm(len(data), generator=generator)[: args.batch].tolist()
            with trace.step_scope():
                loss = step(model, [data[k] for k in order], optimizer, schedule, scaler, trace, args.fault, generator)
            if i % 10 == 0 or i == args.steps - 1:
                print(f"step {i}: loss {loss:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
