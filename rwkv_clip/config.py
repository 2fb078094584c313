"""The shape of a model: a frozen dataclass, read from the JSON files that RWKV-CLIP models are described with."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from rwkv_clip.errors import InputError, nearest
from rwkv_clip.wkv import Engine

__all__ = ["ModelConfig", "config_names", "load_model_configs"]

# Keys of the JSON format that describe a training run or another model family, not the shape of this model.
KEYS_WITHOUT_EFFECT = frozenset({"workers", "precision", "data_type", "tiny_att_layer"})
# Variants that no published model uses. They are read so that asking for one is an error, not silence.
KEYS_THAT_MUST_BE_ZERO = frozenset({"pos_emb", "head_qk", "tiny_att_dim"})


def _setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of both towers. Field names are those of the JSON format; units: pixels, channels, tokens, layers.

    Raises:
        InputError: for sizes that cannot be built, naming the fields and their values.
    """

    input_size: int = _setting(224, "side of the square input image, in pixels")
    image_depth: int = _setting(12, "layers of the image tower")
    image_embed_dims: int = _setting(384, "width of the image tower, in channels; must equal n_embd")
    image_patch_size: int = _setting(16, "side of a square patch, in pixels")
    image_hidden_rate: int = _setting(4, "width of the image tower's channel mix, as a multiple of its width")
    image_num_heads: int = _setting(8, "WKV heads of the image tower")
    image_output_cls_token: bool = _setting(False, "image feature is the class token's row, not the mean over patches")
    image_with_cls_token: bool = _setting(False, "append a class token after the patches")
    drop_path_rate: float = _setting(0.0, "chance to drop a branch in the image tower's last layer (0 in its first)")
    dropout: float = _setting(0.0, "dropout of the text tower, on the residual stream")
    ctx_len: int = _setting(77, "tokens of a caption, padding included")
    vocab_size: int = _setting(49408, "rows of the token embedding")
    text_initialization: bool = _setting(True, "start the text tower from its own initial weights, not torch's")
    head_size: int = _setting(8, "channels of a text WKV head (unless text_num_head is given)")
    text_num_head: int = _setting(0, "WKV heads of the text tower; 0: n_embd / head_size")
    head_size_divisor: int = _setting(8, "scales the epsilon of the text tower's group norm: 1e-5 times its square")
    n_layer: int = _setting(12, "layers of the text tower")
    n_embd: int = _setting(384, "width of the text tower, in channels")
    dim_att: int = _setting(0, "width of the text tower's time mix; 0: n_embd, the only width supported")
    dim_ffn: int = _setting(0, "width of the text tower's channel mix; 0: 3.5 n_embd rounded down to 32")
    with_cp: bool = _setting(False, "recompute the image layers in backward instead of keeping their activations")
    wkv_engine: Engine = _setting(  # noqa: RUF009 - a string, which cannot be shared by mistake
        "auto", "which implementation of the WKV recurrence: auto, reference, chunked or cuda"
    )

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise InputError(f"model configuration: {problem}")

    @property
    def text_heads(self) -> int:
        """WKV heads of the text tower."""
        return self.text_num_head or self.n_embd // self.head_size

    @property
    def text_hidden(self) -> int:
        """Width of the text tower's channel mix."""
        return self.dim_ffn or int(3.5 * self.n_embd) // 32 * 32

    @property
    def image_grid(self) -> int:
        """Patches along one side of the input image; a last, partial patch counts."""
        return -(-self.input_size // self.image_patch_size)

    def _problems(self) -> typing.Iterator[str]:
        if self.image_embed_dims != self.n_embd:
            yield f"image_embed_dims {self.image_embed_dims} and n_embd {self.n_embd} must be equal"
        if self.dim_att not in (0, self.n_embd):
            yield f"dim_att {self.dim_att} must be 0 or n_embd {self.n_embd}"
        if self.image_output_cls_token and not self.image_with_cls_token:
            yield "image_output_cls_token needs image_with_cls_token"
        if self.text_num_head == 0 and (self.head_size < 1 or self.n_embd % self.head_size):
            yield f"n_embd {self.n_embd} is not a multiple of head_size {self.head_size}"
            return
        for tower, heads in (("image", self.image_num_heads), ("text", self.text_heads)):
            if heads < 1 or self.n_embd % (4 * heads):
                yield f"{heads} {tower} heads: the width {self.n_embd} must be a multiple of 4 channels per head"
        for name in ("input_size", "image_depth", "image_patch_size", "ctx_len", "vocab_size", "n_layer"):
            if getattr(self, name) < 1:
                yield f"{name} {getattr(self, name)} must be at least 1"
        for name in ("drop_path_rate", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name} {getattr(self, name)} must be in [0, 1)"
        if self.wkv_engine not in typing.get_args(Engine):
            yield f"wkv_engine {self.wkv_engine!r} must be one of {', '.join(typing.get_args(Engine))}"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "model configuration") -> ModelConfig:
        """Build from the JSON format's keys; ``source`` names where they came from in errors.

        Raises:
            InputError: for an unknown key (with the nearest known one), a value of the wrong type, or sizes that
                cannot be built.
        """
        kinds = typing.get_type_hints(cls)
        known: dict[str, Any] = {}
        for name, value in values.items():
            if name in kinds:
                known[name] = _as(kinds[name], value, f"{source}: {name}")
            elif name in KEYS_THAT_MUST_BE_ZERO:
                if value not in (0, False, "0"):
                    raise InputError(f"{source}: {name} = {value!r} is not supported, only 0")
            elif name not in KEYS_WITHOUT_EFFECT:
                raise InputError(f"{source}: unknown key {name!r}{nearest(name, kinds)}")
        return cls(**known)

    @classmethod
    def from_namespace(cls, args: object) -> ModelConfig:
        """Build from any object that has some of the fields as attributes; the others keep their defaults."""
        names = [f.name for f in dataclasses.fields(cls)]
        return cls.from_mapping({n: getattr(args, n) for n in names if getattr(args, n, None) is not None})


def _as(kind: Any, value: Any, where: str) -> Any:
    """``value`` as a field of type ``kind``; the words True and False count as booleans."""
    if kind is bool and value in ("True", "False"):
        return value == "True"
    if kind is float and type(value) is int:
        return float(value)
    if kind in (bool, int, float) and type(value) is not kind:
        raise InputError(f"{where} = {value!r}: expected {kind.__name__}")
    return value


def config_names() -> list[str]:
    """Names of the configurations that come with the package."""
    return sorted(path.name.removesuffix(".json") for path in _packaged().iterdir() if path.name.endswith(".json"))


def _packaged() -> resources.abc.Traversable:
    return resources.files("rwkv_clip") / "configs"


def load_model_configs(path_or_name: str | Path) -> ModelConfig:
    """Read a model configuration from a JSON file, or by the name of one that comes with the package.

    ``"RWKV_CLIP_B32"`` and ``"RWKV_CLIP_B32.json"`` name the packaged file unless a file of that name exists here.

    Raises:
        InputError: when there is no such file or name, or what it holds is not a model configuration.
    """
    path = Path(path_or_name)
    name = str(path_or_name).removesuffix(".json")
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    elif name in config_names():
        text = (_packaged() / f"{name}.json").read_text(encoding="utf-8")
    else:
        raise InputError(f"no model configuration {str(path_or_name)!r}: no such file{nearest(name, config_names())}")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path_or_name}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path_or_name}: expected a JSON object of settings, seen {type(values).__name__}")
    return ModelConfig.from_mapping(values, source=str(path_or_name))
