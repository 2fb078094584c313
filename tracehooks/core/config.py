"""The recording configuration: one frozen value from options, environment variables and a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tracehooks.core.errors import InvalidOptionError, UnknownNameError, shown

RECORDABLE = (
    "outputs",
    "inputs",
    "output_grads",
    "parameters",
    "gradients",
    "updates",
    "optimizer_state",
    "masks",
    "samples",
)
ON_NONFINITE = ("record", "locate", "raise", "skip")
LOCATE = ("replay", "ops")
DURABILITY = ("process", "fsync")
ENV_PREFIX = "TRACEHOOKS_"


@dataclass(frozen=True)
class Config:
    """What attach() records and how.

    Values come, first found first, from attach()'s own options, from environment variables ``TRACEHOOKS_<NAME>``
    (lists comma-separated, booleans as 0/1/true/false), from ``config=`` (a Config, a mapping or a TOML file), from
    the defaults below.

    Raises:
        UnknownNameError: an option that does not exist; the nearest names are listed.
        InvalidOptionError: a value of the wrong type or out of range.
    """

    record: tuple[str, ...] = tuple(name for name in RECORDABLE if name not in ("inputs", "optimizer_state"))
    """Which tensors are recorded: any of `RECORDABLE`. Root inputs always are."""
    modules: str | tuple[str, ...] | Callable[[str], bool] = "*"
    """Glob patterns on canonical module paths, or a predicate on the path."""
    exclude: str | tuple[str, ...] | Callable[[str], bool] = ()
    """The same, for modules to leave out."""
    every: int | Callable[[int], bool] = 1
    """Record tensors every n-th step, or where a predicate on the step's number says so; scalars every step."""
    budget: float | None = None
    """Largest share of a step's time that recording may take (0.02: 2 %): steps are recorded more rarely than `every` says
    to keep it. The watch for non-finite values goes on in every step."""
    on_nonfinite: str = "locate"
    """record: note it and go on; locate: also say where; raise: NonFiniteError before the optimizer step; skip: drop
    the gradients of this step and go on."""
    locate: str = "replay"
    """How the first non-finite op is found. replay: by running the step again; ops: by watching every op of every step,
    for code that cannot be run again."""
    snapshot: bool = False
    """Keep the operands of the first non-finite op, and the batch, as safetensors files."""
    diagnose_every: int | None = None
    """Say what is wrong with the run while it trains, each finding once: look every so many steps, beside the training."""
    hash: bool = True
    """Record a content hash of every tensor."""
    sketch: bool = False
    """Record 16 signed sums of every tensor, for distances between traces."""
    histogram: bool = False
    """Record counts by power of two of the magnitude."""
    durability: str = "process"
    """process: a step's rows survive the death of the process; fsync: and of the machine."""
    resume: bool = False
    """Add to the run that the directory holds."""
    quiet: bool = False
    """Print nothing."""

    def __post_init__(self) -> None:
        for name in ("record", "modules", "exclude"):
            value = getattr(self, name)
            if isinstance(value, list | tuple | set | frozenset):
                object.__setattr__(self, name, tuple(value))
            elif name == "record" and isinstance(value, str):
                object.__setattr__(self, name, (value,))
        _check(self)

    def with_options(self, options: Mapping[str, Any], where: str = "attach()") -> Config:
        """A copy with options changed; an unknown name is an error."""
        names = [item.name for item in fields(self)]
        for name in options:
            if name not in names:
                raise UnknownNameError("option", str(name), names, where)
        return replace(self, **options)

    def to_json(self) -> dict[str, Any]:
        """As run.json holds it; predicates appear by their name."""
        return {name: _jsonable(value) for name, value in asdict(self).items()}


def resolve(options: Mapping[str, Any], config: Config | Mapping[str, Any] | str | Path | None = None) -> Config:
    """The configuration of one attach(): options over environment over ``config`` over defaults."""
    base = config if isinstance(config, Config) else _from_source(config)
    return base.with_options(_from_environment(os.environ), "environment").with_options(options)


def _from_source(config: Mapping[str, Any] | str | Path | None) -> Config:
    if config is None:
        return Config()
    if isinstance(config, Mapping):
        return Config().with_options(config, "config")
    if not isinstance(config, str | os.PathLike):
        raise InvalidOptionError("config", shown(config), "a Config, a mapping or the path of a TOML file")
    path = Path(config)
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidOptionError("config", str(path), f"a readable TOML file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOptionError("config", str(path), f"TOML ({error})") from error
    return Config().with_options(table.get("tracehooks", table), str(path))


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    kinds = {item.name: item for item in fields(Config)}
    found = {}
    for variable, text in environment.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX):
            continue
        if name not in kinds:
            raise UnknownNameError("option", variable, [ENV_PREFIX + known.upper() for known in kinds], "environment")
        found[name] = _parsed(name, text, kinds[name].default)
    return found


def _parsed(name: str, text: str, default: object) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise InvalidOptionError(ENV_PREFIX + name.upper(), text, "0, 1, true or false")
        return text.lower() in ("1", "true")
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError as error:
            raise InvalidOptionError(ENV_PREFIX + name.upper(), text, "a whole number") from error
    if name == "diagnose_every":
        return _parsed(name, text, 0)
    if name == "budget":
        try:
            return float(text)
        except ValueError as error:
            raise InvalidOptionError(ENV_PREFIX + name.upper(), text, "a number between 0 and 1") from error
    if name in ("record", "modules", "exclude"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _check(config: Config) -> None:
    if not isinstance(config.record, tuple) or not all(isinstance(name, str) for name in config.record):
        raise InvalidOptionError("record", config.record, f"some of {', '.join(RECORDABLE)}")
    for name in config.record:
        if name not in RECORDABLE:
            raise UnknownNameError("record", name, RECORDABLE, "option record")
    if config.on_nonfinite not in ON_NONFINITE:
        raise UnknownNameError("on_nonfinite", str(config.on_nonfinite), ON_NONFINITE, "option on_nonfinite")
    if config.locate not in LOCATE:
        raise UnknownNameError("locate", str(config.locate), LOCATE, "option locate")
    if config.durability not in DURABILITY:
        raise UnknownNameError("durability", str(config.durability), DURABILITY, "option durability")
    if not callable(config.every) and (
        isinstance(config.every, bool) or not isinstance(config.every, int) or config.every < 1
    ):
        raise InvalidOptionError("every", config.every, "a whole number of steps from 1, or a predicate on the step")
    looks = config.diagnose_every
    if looks is not None and (isinstance(looks, bool) or not isinstance(looks, int) or looks < 1):
        raise InvalidOptionError("diagnose_every", looks, "a whole number of steps from 1, or None")
    budget = config.budget
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1):
        raise InvalidOptionError("budget", budget, "a share of step time between 0 and 1, 0.02 for 2 %, or None")
    for name in ("snapshot", "hash", "sketch", "histogram", "resume", "quiet"):
        if not isinstance(getattr(config, name), bool):
            raise InvalidOptionError(name, getattr(config, name), "True or False")
    for name in ("modules", "exclude"):
        value = getattr(config, name)
        globs = value if isinstance(value, tuple) else (value,)
        if not (callable(value) or all(isinstance(part, str) for part in globs)):
            raise InvalidOptionError(name, value, "glob patterns or a predicate on the path")


def _jsonable(value: Any) -> Any:
    if callable(value):
        return f"<{getattr(value, '__qualname__', type(value).__name__)}>"
    return list(value) if isinstance(value, tuple) else value
