"""An answer: a `FirstNonFinite` with its cause, in fields and in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tracehooks.core.records import FirstNonFinite
from tracehooks.locate.case import Cause
from tracehooks.locate.ops import Details, Op, Place, Status


def found(
    step: int,
    phase: str,
    module: str | None,
    op: str | None,
    status: Status,
    place: Place | None,
    details: Details | None = None,
    params: tuple[str, ...] = (),
) -> FirstNonFinite:
    """An answer without its words."""
    return FirstNonFinite(
        step=step,
        phase=phase,
        module=module,
        value="nan" if status.nan else "inf" if status.posinf else "-inf",
        message="",
        op=op,
        file=place.file if place else None,
        line=place.line if place else None,
        code=place.code if place else None,
        params=params,
        inputs=tuple(details.inputs) if details else (),
        output=details.output if details else None,
    )


def told(first: FirstNonFinite, cause: Cause | None = None, turned_nan: Op | None = None) -> FirstNonFinite:
    """The same with its cause and a message of a few lines: where, op and line, output, inputs, cause, what to do."""
    where = "outside the model" if first.module is None else f"module {first.module or '(root)'}"
    lines = [f"first non-finite value, step {first.step}, {first.phase}, {where}, {first.value}"]
    if first.op:
        lines.append(
            f"  op      {first.op}{_line(first.file, first.line)}" + (f"   {first.code}" if first.code else "")
        )
    if first.params:
        lines.append(f"  params  {', '.join(first.params)}")
    if first.output:
        lines.append(f"  output  {_tensor(first.output)}")
    lines += [f"  input   {_tensor(x)}" for x in first.inputs]
    if turned_nan is not None:
        place = turned_nan.place
        at = _line(place.file, place.line) if place else ""
        lines.append(f"  then    it turns to NaN in {turned_nan.name}, {_module(turned_nan)}{at}")
    if cause is not None:
        lines.append(f"  cause   {cause.tag}: {cause.sentence}")
        lines.append(f"  next    {cause.next_check}")
    return replace(first, message="\n".join(lines), cause=cause.tag if cause else first.cause)


def unsure(seen: FirstNonFinite, doubt: str) -> FirstNonFinite:
    """What was seen, and why it is all that can be said."""
    return replace(
        seen, message=f'{seen.message}\n  only the module is known: {doubt}; locate="ops" would watch every op'
    )


def with_buffer(first: FirstNonFinite, name: str) -> FirstNonFinite:
    """The same, naming the buffer that it poisoned."""
    return replace(first, buffer=name, message=f"{first.message}\n  buffer  {name} holds it from now on")


def cause_of(op: Op) -> Cause:
    """Why an op made it, as told when it ran."""
    if op.details is None:
        return Cause("unknown", f"{op.name} made it", "look at its operands")
    return Cause(op.details.cause, op.details.sentence, op.details.next_check)


def _module(op: Op) -> str:
    return "outside the model" if op.module is None else f"module {op.module or '(root)'}"


def _line(file: str | None, line: int | None) -> str:
    return f"  {file}:{line}" if file else ""


def _tensor(numbers: Any) -> str:
    counts = [f"{label} in {numbers[key]:,}" for key, label in _COUNTS if numbers.get(key)]
    text = f"{numbers['dtype']} {tuple(numbers['shape'])}"
    text += f"  {', '.join(counts)} of {numbers['count']:,}" if counts else ""
    if numbers.get("min") is not None:
        text += f"  finite range {numbers['min']:.6g} … {numbers['max']:.6g}"
    return text + (f"  samples {', '.join(map(str, numbers['samples']))}" if numbers.get("samples") else "")


_COUNTS = (("nan", "NaN"), ("posinf", "+inf"), ("neginf", "-inf"))
