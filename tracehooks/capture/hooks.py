"""The objects that sit in a model's hook tables.

They are callable objects, not closures, so that a hooked model can be copied and pickled: a copy gets in their place a
callable of the standard library that does nothing, so that it is silent, holds nothing of the recording, and loads
where tracehooks is not installed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from tracehooks.capture.lane import KEY, seat
from tracehooks.capture.places import Place, Site

if TYPE_CHECKING:
    from tracehooks.capture.session import Session


def _silent() -> Callable[..., None]:
    """A callable that takes any positional arguments and returns None."""
    return contextlib.nullcontext().__exit__


class Hook:
    """A callable in a hook table that belongs to one session."""

    __slots__ = ("session",)

    def __init__(self, session: Session) -> None:
        self.session = session

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _silent()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class OutputHook(Hook):
    """Forward hook of one module: its outputs, and the gradients that will reach them."""

    __slots__ = ("path", "seat", "sites", "type")

    def __init__(self, session: Session, path: str, module: nn.Module) -> None:
        super().__init__(session)
        self.path, self.type = path, type(module).__name__
        self.sites: dict[tuple[str, int, int, bool], tuple[Site, GradientHook]] = {}
        self.seat = seat(session.recorder.lane, self, path)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_dynamo_compiling() or self.seat.take(output):
            return
        if self.session.live and not torch.compiler.is_compiling():
            self.session.module_returned((self, args), output)

    def site(self, slot: str, call: int, micro: int, recompute: bool) -> tuple[Site, GradientHook]:
        """Where a tensor of this module is seen, and the hook for its gradient: made once."""
        key = slot, call, micro, recompute
        known = self.sites.get(key)
        if known is None:
            place = Place("forward", self.path, self.type, *key)
            known = Site(place), GradientHook(self.session, Site(place._replace(phase="backward")))
            if place.returns:
                self.sites[key] = known
        return known


class InputHook(Hook):
    """Forward pre-hook of one module: its inputs, before the module can change them in place, and its masks."""

    __slots__ = ("names", "path")

    def __init__(self, session: Session, path: str, names: tuple[str, ...]) -> None:
        super().__init__(session)
        self.path, self.names = path, names

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self.session.recording:
            self.session.module_called(self.path, named_arguments(self.names, args, kwargs))


class PassBegins(Hook):
    """Forward pre-hook of the root, first of all."""

    __slots__ = ("names",)

    def __init__(self, session: Session, names: tuple[str, ...]) -> None:
        super().__init__(session)
        self.names = names

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.session.comes_next("pass")
            self.session.pass_begins(args, kwargs, named_arguments(self.names, args, kwargs))


class PassEnds(Hook):
    """Forward hook of the root, always called: a forward pass that raised is over, too."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.session.pass_ends(output)
            self.session.loss_begins(output)


class SharedOutputHook(Hook):
    """Global forward hook that serves modules on whose own hook tables torch looks before it takes a faster path."""

    __slots__ = ("hooks",)

    def __init__(self, session: Session, hooks: dict[int, OutputHook]) -> None:
        super().__init__(session)
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        hook = self.hooks.get(id(module))
        if hook is not None:
            hook(module, args, output)


class SharedPassHook(Hook):
    """Global forward or forward pre-hook that stands in for a root's own; arguments by keyword are not seen there."""

    __slots__ = ("hook", "root")

    def __init__(self, session: Session, root: int, hook: PassBegins | PassEnds) -> None:
        super().__init__(session)
        self.root, self.hook = root, hook

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if id(module) == self.root:
            self.hook(module, args, {} if isinstance(self.hook, PassBegins) else output)


class GradientHook(Hook):
    """Tensor hook for d loss / d tensor of one site. It holds the site, never the tensor."""

    __torch_unserializable__ = True  # torch.save drops it without a warning
    __slots__ = ("lane", "site")

    def __init__(self, session: Session, site: Site) -> None:
        super().__init__(session)
        self.lane, self.site = session.recorder.lane, site

    def __call__(self, gradient: Tensor | None) -> None:
        # None comes where a custom function sends nothing back
        if is_dynamo_compiling() or gradient is None or self.lane.arrived(self.site, gradient):
            return
        if not torch.compiler.is_compiling():
            self.session.gradient_arrived(self.site, gradient)


class BackwardSeen(Hook):
    """Tensor hook of one output of the root: notes that a backward pass reached this model, and with what."""

    __torch_unserializable__ = True
    __slots__ = ("micro", "slot")

    def __init__(self, session: Session, micro: int, slot: str) -> None:
        super().__init__(session)
        self.micro, self.slot = micro, slot

    def __call__(self, gradient: Tensor | None) -> None:
        # None comes where a custom function sends nothing back
        if gradient is not None and not torch.compiler.is_compiling():
            self.session.backward_reached(self.micro, self.slot, gradient)


class TensorHooks:
    """Hooks on the tensors of the passes whose backward has not come yet."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.tables: list[weakref.ref[dict[int, GradientHook]]] = []
        """Tables of hooks that the fast lane gave to tensors: ours has the key `KEY` there."""
        self._leaves: dict[tuple[int, object], RemovableHandle] = {}
        self._sweep_at = 1024

    def add(self, tensor: Tensor, hook: GradientHook | BackwardSeen) -> None:
        """Hook a tensor that requires a gradient."""
        # reading grad_fn first brings a stale view's node up to date; without it register_hook can crash the process
        leaf = tensor.grad_fn is None
        handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if leaf:  # it lives on: one hook for each row of it, the latest
            key = id(tensor), hook.site.place[1:5] if isinstance(hook, GradientHook) else hook.slot
            if key in self._leaves:
                self._leaves[key].remove()
            self._leaves[key] = handle
        else:
            self._handles.append(handle)

    def sweep(self) -> None:
        """Let go of the tensors of passes that had no backward, and are gone."""
        if len(self._handles) + len(self.tables) > self._sweep_at:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self.tables[:] = [table for table in self.tables if table() is not None]
            self._sweep_at = max(1024, 2 * (len(self._handles) + len(self.tables)))

    def forget(self) -> None:
        """Backward is over. Other tensors take their hooks with them; hooks on leaves would fire in every later pass."""
        for handle in self._leaves.values():
            handle.remove()
        self._leaves.clear()
        self._handles.clear()
        self.tables.clear()

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        for table in [table for ref in self.tables if (table := ref()) is not None]:
            table.pop(KEY, None)
        self.forget()


def named_arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments by the name that forward() gives them; by index beyond those (``*args``)."""
    positional = [(names[i] if i < len(names) else str(i), value) for i, value in enumerate(args)]
    return positional + list(kwargs.items())
