"""Values that are not finite."""

from __future__ import annotations

from tracehooks.analysis.first import first
from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule


@rule(
    sees="the first NaN or infinity that damaged the loss, a gradient, a buffer or a parameter",
    threshold="one such value; infinities of masks, and gradients that a GradScaler handles, are none",
    source="the recorder's own verdict, see causes.md",
    needs="any row of a tensor, or a loss",
    next_check="tracehooks first RUN shows the op, its operands and the line",
    evidence=("cause", "phase", "op", "value", "params", "buffers", "file", "line"),
)
def nonfinite(facts: Facts) -> Answers:
    found = first(facts.run)
    if found is not None:
        evidence = {
            "cause": found.cause,
            "phase": found.phase,
            "op": found.op,
            "value": found.value,
            "params": list(found.params) or None,
            "buffers": [found.buffer] if found.buffer else None,
            "file": found.file,
            "line": found.line,
        }
        yield Found("error", found.message.splitlines()[0], found.step, found.module or "", evidence)
    if steps := len(facts.recorded) or len(facts.scalar("loss").values):
        yield Clear(f"0 values that are not finite and matter in {steps} steps")


RULES = (nonfinite,)
