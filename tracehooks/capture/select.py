"""Which modules are watched, under which names, and by which kind of hook."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from tracehooks.core import names
from tracehooks.core.config import Config

UNWRAPPABLE = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""Wrapper classes and the attribute under which they keep the module that people mean. torch.compile's wrapper is not
one of them: hooks on it run, hooks inside it are compiled away."""


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and the like."""
    *_, inner = _unwrapping(model)
    return inner


def wrappers(model: nn.Module) -> list[str]:
    """Classes of the wrappers around the module that people mean, the outermost first."""
    *around, _ = _unwrapping(model)
    return [type(module).__name__ for module in around]


def _unwrapping(model: nn.Module) -> Iterator[nn.Module]:
    yield model
    attribute = UNWRAPPABLE.get(type(model).__name__)
    inner = getattr(model, attribute, None) if attribute else None
    if isinstance(inner, nn.Module):
        yield from _unwrapping(inner)


def named_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Modules by canonical path, each once, the root first. Where a wrapper and its module share a path, the module,
    unless it is compiled."""
    found: dict[str, nn.Module] = {}
    for path, module in root.named_modules():
        if type(found.get(_canonical(path))).__name__ != "OptimizedModule":
            found[_canonical(path)] = module
    return found


def held(root: nn.Module) -> dict[int, str]:
    """Canonical paths of all modules, wrappers too, by the modules' identity."""
    return {id(module): _canonical(path) for path, module in root.named_modules()}


def selected(root: nn.Module, config: Config) -> dict[str, nn.Module]:
    """The modules that ``modules`` selects and ``exclude`` does not.

    Raises:
        UnknownNameError: a pattern that matches no module.
    """
    modules = named_modules(root)
    return {path: modules[path] for path in names.select(modules, config.modules, config.exclude)}


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of forward()'s positional parameters, without self; empty where the signature cannot be read."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)


def takes_mask(module: nn.Module) -> bool:
    """Whether a parameter of forward() is named like a mask."""
    try:
        return any("mask" in name for name in inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return False


def behind_fast_path(modules: dict[str, nn.Module]) -> set[int]:
    """ids of modules whose own hook tables must stay empty: nn.TransformerEncoderLayer leaves its fused path as soon as
    it or a module inside it has a forward hook, and with it the numbers change."""
    layers = [module for module in modules.values() if isinstance(module, nn.TransformerEncoderLayer)]
    return {id(inner) for layer in layers for inner in layer.modules()}


def _canonical(path: str) -> str:
    # the root is unwrapped, so a leading "module" is the user's own name here
    return names.canonical(f".{path}").lstrip(".")
