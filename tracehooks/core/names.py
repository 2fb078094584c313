"""Names of places in a model: canonical paths and the patterns that select them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence

from tracehooks.core.errors import UnknownNameError

WRAPPER_PARTS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path parts that wrappers (DataParallel, torch.compile, FSDP, checkpoint_wrapper) add. ``module`` is one only at the
front, where DataParallel and DistributedDataParallel put it: elsewhere it may be the user's own name."""

Pattern = str | Sequence[str] | Callable[[str], bool]


def canonical(path: str) -> str:
    """The path without wrapper parts: ``module._orig_mod.blocks.0._checkpoint_wrapped_module.fc`` → ``blocks.0.fc``."""
    parts = path.split(".") if path else []
    while parts and parts[0] in WRAPPER_PARTS:
        parts = parts[1:]
    return ".".join(part for part in parts if part == "module" or part not in WRAPPER_PARTS)


def split_parameter(path: str) -> tuple[str, str]:
    """Module path and slot of a parameter path: ``blocks.0.weight`` → ``("blocks.0", "weight")``."""
    module, _, slot = path.rpartition(".")
    return module, slot


def select(
    paths: Iterable[str], patterns: Pattern, exclude: Pattern = (), *, where: str = "attach(modules=…)"
) -> list[str]:
    """The paths that a glob pattern (or one of several, or a predicate) selects and ``exclude`` does not.

    ``*`` matches across dots, the root's path is the empty string and only ``"*"`` and ``""`` select it.

    Raises:
        UnknownNameError: a pattern that matches no path at all; the nearest paths are listed.
    """
    known = list(paths)
    return [path for path in _matching(known, patterns, where) if path not in set(_matching(known, exclude, where))]


def _matching(known: list[str], patterns: Pattern, where: str) -> list[str]:
    if callable(patterns):
        return [path for path in known if patterns(path)]
    globs = [patterns] if isinstance(patterns, str) else list(patterns)
    for glob in globs:
        if not any(fnmatch.fnmatchcase(path, glob) for path in known):
            raise UnknownNameError("module pattern", glob, known, where)
    return [path for path in known if any(fnmatch.fnmatchcase(path, glob) for glob in globs)]
