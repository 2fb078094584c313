"""Hooks onto modules and off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from tracehooks.capture import select, torch_internals
from tracehooks.capture.hooks import InputHook, OutputHook, PassBegins, PassEnds, SharedOutputHook, SharedPassHook

if TYPE_CHECKING:
    from tracehooks.capture.session import Session


class Wiring:
    """The hooks that one session has put on modules."""

    def __init__(self, session: Session, root: nn.Module) -> None:
        self.session = session
        self.root = root
        self.paths: dict[str, nn.Module] = {}
        """Modules whose outputs are recorded."""
        self.modules: dict[str, nn.Module] = {}
        """All modules."""
        self.held: dict[int, str] = {}
        """Paths of all modules, wrappers too, by the modules' identity."""
        self._handles: list[RemovableHandle] = []
        self._of_outputs: list[tuple[nn.Module, OutputHook, RemovableHandle | None]] = []
        """Modules other than the root with hooks of their own; no handle while the hook is off."""
        self._watching = True

    def connect(self) -> None:
        """Put hooks on the root and on every selected module.

        Raises:
            UnknownNameError: a module pattern that matches nothing.
        """
        self.paths = select.selected(self.root, self.session.config)
        self.modules = modules = select.named_modules(self.root)
        self.held = select.held(self.root)
        shared = select.behind_fast_path(modules)
        kept_off: dict[int, OutputHook] = {}
        self._connect_root_entry(id(self.root) in shared)
        for path, module in self.paths.items():
            hook = OutputHook(self.session, path, module)
            if id(module) in shared:
                kept_off[id(module)] = hook
            else:
                self._connect_module(path, module, hook)
        if kept_off:
            self._handles.append(register_module_forward_hook(SharedOutputHook(self.session, kept_off)))
        self._connect_root_exit(id(self.root) in shared)

    def disconnect(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        for *_, taken in self._of_outputs:
            if taken is not None:
                taken.remove()
        self._handles.clear()
        self._of_outputs.clear()
        self._watching = True
        self.paths, self.modules, self.held = {}, {}, {}

    def watch_modules(self, watching: bool) -> None:
        """Have the hooks of the modules inside the root, or take them off for a while: torch calls a module without hooks
        on a shorter way. Hooks of others keep their order: where one came after ours, ours stays."""
        if watching == self._watching or torch_internals.anything_compiled():  # whose guards look at hooks
            return
        self._watching = watching
        for i, (module, hook, handle) in enumerate(self._of_outputs):
            if not watching and handle is not None and torch_internals.is_last_forward_hook(module, handle):
                handle.remove()
                self._of_outputs[i] = module, hook, None
            elif watching and handle is None:
                self._of_outputs[i] = module, hook, module.register_forward_hook(hook)

    def reconnect(self) -> None:
        """Hook the model as it is now."""
        self.disconnect()
        self.connect()

    def release(self) -> None:
        """Let go of the model."""
        self.root = nn.Module()

    def _connect_module(self, path: str, module: nn.Module, hook: OutputHook) -> None:
        try:
            handle = module.register_forward_hook(hook)
        except RuntimeError as error:  # a ScriptModule: opaque, its parents are recorded
            self._note_refused(path, error)
            return
        if module is self.root:
            self._handles.append(handle)
        else:
            self._of_outputs.append((module, hook, handle))
        wants = self.session.config.record
        if module is not self.root and ("inputs" in wants or ("masks" in wants and select.takes_mask(module))):
            before = InputHook(self.session, path, select.argument_names(module))
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))

    def _connect_root_entry(self, shared: bool) -> None:
        hook = PassBegins(self.session, select.argument_names(self.root))
        if shared:
            self._handles.append(register_module_forward_pre_hook(SharedPassHook(self.session, id(self.root), hook)))
        else:
            self._try_root(lambda: self.root.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def _connect_root_exit(self, shared: bool) -> None:
        hook = PassEnds(self.session)
        if shared:
            last = SharedPassHook(self.session, id(self.root), hook)
            self._handles.append(register_module_forward_hook(last, always_call=True))
        else:
            self._try_root(lambda: self.root.register_forward_hook(hook, always_call=True))

    def _try_root(self, register: Callable[[], RemovableHandle]) -> None:
        try:
            self._handles.append(register())
        except RuntimeError as error:
            self._note_refused("", error)

    def _note_refused(self, path: str, error: RuntimeError) -> None:
        reason = str(error).splitlines()[0]
        message = f"{path or '(root)'} takes no hooks: {reason}"
        self.session.recorder.event("module_not_hooked", "info", message, {"reason": reason}, module=path)
