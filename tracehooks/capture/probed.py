"""What a session makes of the tensors that probes show it."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.edge import Companion, swift_edge
from tracehooks.capture.hooks import GradientHook
from tracehooks.capture.places import FEW_CALLS, Place, Site
from tracehooks.core.errors import InvalidOptionError
from tracehooks.stats.audio import summarize_audio
from tracehooks.stats.tokens import summarize_tokens

if TYPE_CHECKING:
    from tracehooks.capture.session import Session


class Sighting(NamedTuple):
    """One call of a probe."""

    kind: str
    """probe, mask, tokens or audio."""
    path: str
    """Module in which it was called, the root where it was called outside of all."""
    name: str
    asked: tuple[Any, ...]
    """The other arguments of the probe."""
    inside: bool
    """Whether it was called in a module."""
    within: str | None
    """What compiled code knows of the path; None outside of it."""


class Probed(Companion):
    """Rows, masks and scalars of probes."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._sites: dict[Place, Site] = {}
        self._awaited: defaultdict[tuple[str, str], deque[Place]] = defaultdict(lambda: deque(maxlen=FEW_CALLS))
        """Where tensors of compiled code were seen whose gradient has not come yet, by what its op knows."""

    @swift_edge
    def seen(self, sighting: Sighting, x: Tensor) -> None:
        """A probe was called."""
        session = self._session
        if not session.live or torch_internals.tracing():
            return
        if not isinstance(x, Tensor):
            raise InvalidOptionError(f"{sighting.kind}(…, {sighting.name!r})", type(x).__name__, "a tensor")
        recompute = torch_internals.graph_task_id() != -1
        key = f"{sighting.path} {sighting.name}"
        if sighting.inside and not recompute and not session.passes.depth:
            session.ran_outside(key, x)
        call = session.passes.next_call(key, recompute)
        if sighting.kind == "mask":
            if not recompute and "masks" in session.config.record:
                self._mask(x, sighting)
            return
        module = session.wiring.modules.get(sighting.path)
        type_name = type(module).__name__ if module is not None else ""
        place = Place("probe", sighting.path, type_name, sighting.name, call, session.steps.micro, recompute)
        session.recorder.tensor(x, self._site(place))
        if sighting.kind == "probe":
            self._await_gradient(x, sighting, place._replace(phase="backward"))
        elif session.recording and not recompute:
            self._numbers(x, sighting)

    @swift_edge
    def gradient_arrived(self, seen: tuple[str, str], gradient: Tensor) -> None:
        """Compiled code handed over the gradient of what a probe saw in it (by what its op knows of the path, and name).
        Where the same code runs for several modules the latest of them comes first."""
        places = self._awaited[seen]
        if places:
            self._session.gradient_arrived(self._site(places.pop()), gradient)

    def _site(self, place: Place) -> Site:
        site = self._sites.get(place)
        if site is None:
            site = Site(place)
            if place.returns:
                self._sites[place] = site
        return site

    def _await_gradient(self, x: Tensor, sighting: Sighting, place: Place) -> None:
        session = self._session
        if not session.recording or "output_grads" not in session.config.record:
            return
        if sighting.within is not None:
            if sighting.asked[0]:
                self._awaited[sighting.within, sighting.name].append(place)
        elif torch.is_grad_enabled() and x.requires_grad:
            session.tensor_hooks.add(x, GradientHook(session, self._site(place)))

    def _mask(self, x: Tensor, sighting: Sighting) -> None:
        keep, dim = sighting.asked
        if not -x.ndim <= dim < x.ndim:
            raise InvalidOptionError(f"dim of mask(…, {sighting.name!r})", dim, f"a dimension of {tuple(x.shape)}")
        values, convention = torch_internals.unwrapped(x), "keep=True" if keep else "keep=False"
        if values is not None:
            row_last = values.movedim(dim - x.ndim if dim >= 0 else dim, -1)  # a transform's dimension stands in front
            micro = self._session.steps.micro
            self._session.recorder.mask(row_last, sighting.path, sighting.name, micro, convention)

    def _numbers(self, x: Tensor, sighting: Sighting) -> None:
        values = torch_internals.unwrapped(x)
        if values is None:
            return
        session, site = self._session, f"{sighting.path}.{sighting.name}".removeprefix(".")
        if sighting.kind == "tokens":
            if values.is_floating_point() or values.is_complex():
                raise InvalidOptionError(f"tokens(…, {sighting.name!r})", f"{values.dtype} values", "integer ids")
            found = summarize_tokens(values, *sighting.asked)
        else:
            channels = summarize_audio(values, *sighting.asked)
            found = {f"{name}/{i}": value for name, row in channels.items() for i, value in enumerate(row.unbind())}
        for name, value in found.items():
            session.recorder.scalar(f"{sighting.kind}/{site}/{name}", value, session.steps.micro)
