"""Mixed and low precision: loss scaling, clipping in the wrong place, updates that are rounded away."""

from __future__ import annotations

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts, Seen
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule

SKIPPED_RUNNING = 5
SKIPPED_SHARE = 0.1
ROUNDED_AWAY = 0.99
LOW_PRECISION = {"bfloat16": "bf16_resolution", "float16": "fp16_resolution"}


@rule(
    sees="a GradScaler that goes on skipping optimizer steps",
    threshold=f"the run ends in {SKIPPED_RUNNING} or more skipped steps running, or more than {SKIPPED_SHARE:.0%} of "
    "the steps after the first taken one are skipped; skips while the scale is found do not count",
    source="torch.amp.GradScaler: after its start the scale doubles once in growth_interval=2000 steps, so about one "
    "step in 2000 is skipped",
    needs=needs.SCALER,
    next_check="run the batch in full precision: where the gradients of the named parameters are not finite there "
    "either, the scale is not the reason",
    evidence=("count", "steps", "scale_end", "params", "cause"),
    causes=("gradient_nonfinite_at_any_scale",),
)
def amp_skipped_steps(facts: Facts) -> Answers:
    skipped = sorted({event.step for event in facts.events("optimizer_step_skipped")})
    tried = np.unique(facts.scalar("scale").steps)
    if not skipped or not len(tried):
        if steps := len(facts.scalar("lr/0").values):
            yield Clear(f"0 of {steps} optimizer steps were skipped")
        return
    missed = np.isin(tried, skipped)
    running = int(np.argmin(missed[::-1])) if not missed.all() else len(tried)
    after_first = missed[int(np.argmin(missed)) :] if not missed.all() else missed[:0]
    ends_so = running >= SKIPPED_RUNNING
    if not ends_so and not (after_first.sum() >= SKIPPED_RUNNING and after_first.mean() > SKIPPED_SHARE):
        yield Clear(f"{len(skipped)} of {len(tried)} optimizer steps were skipped, {running} of them at the end")
        return
    scale = facts.scalar("scale").values
    params = _nonfinite_gradients(facts, skipped[-1])
    yield Found(
        "error",
        f"{len(skipped)} of {len(tried)} optimizer steps were skipped because of gradients that are not finite; the loss "
        f"scale went from {scale[0]:g} to {scale[-1]:g}, non-finite at the last: {listed(params) or 'not recorded'}",
        int(tried[len(tried) - running]) if ends_so else skipped[0],
        params[0].rpartition(".")[0] if params else "",
        {
            "count": len(skipped),
            "steps": len(tried),
            "scale_end": float(scale[-1]),
            "params": params,
            "cause": "gradient_nonfinite_at_any_scale" if ends_so else None,
        },
    )


@rule(
    sees="gradients that were clipped while they were still multiplied by the loss scale",
    threshold="the scaler had not unscaled them before its step, and their scaled norm is one and the same number, "
    "to 0.1 %, in at least half of the steps and three of them",
    source="torch.amp documentation, Gradient clipping: without unscale_ the threshold applies to scaled gradients",
    needs=needs.SCALER,
    next_check="call scaler.unscale_(optimizer) before clip_grad_norm_",
    evidence=("count", "max_norm", "cause"),
    causes=("missing_unscale",),
)
def clip_on_scaled_grads(facts: Facts) -> Answers:
    steps, (scale, norm, unscaled) = facts.together("scale", "grad_norm", "scale/unscaled")
    steps, scaled = steps[unscaled == 0], (norm * scale)[unscaled == 0]
    if len(steps) < LASTING:
        if known := len(facts.scalar("lr/0").values):
            yield Clear(
                f"{len(steps)} of {known} steps were taken with gradients that a scaler had not unscaled before"
            )
        return
    top = float(scaled.max())
    same = np.abs(scaled - top) <= 1e-3 * top
    if top > 0 and same.sum() >= LASTING and same.mean() >= 0.5:
        yield Found(
            "error",
            f"gradients were clipped to norm {top:.4g} before they were unscaled: what the optimizer got has norm "
            f"{top / float(scale[-1]):.3g}",
            int(steps[same][0]),
            "",
            {"count": int(same.sum()), "max_norm": top, "cause": "missing_unscale"},
        )
    yield Clear(f"{int(same.sum())} of {len(same)} scaled gradient norms are one and the same number")


@rule(
    sees="parameters whose value a step does not change although gradient and learning rate are not zero: the update "
    "is below half a unit in the last place",
    threshold=f"at least {ROUNDED_AWAY:.0%} of the elements unchanged over three or more steps, with a gradient; a "
    "warning where these parameters hold at least half of the trainable elements, else a note",
    source="rounding to nearest: a change below half the spacing of bfloat16 (2⁻⁹ of the value) or float16 is lost",
    needs=needs.UPDATES,
    next_check="keep the parameters in float32 (a master copy), round stochastically, or raise the learning rate",
    evidence=("params", "count", "share_of_elements", "cause"),
    causes=("bf16_resolution", "fp16_resolution", "resolution"),
)
def update_rounded_away(facts: Facts) -> Answers:
    if not any((series.values > 0).any() for series in facts.scalars("lr/").values()):
        return
    lost = [site for name, site in facts.updates.items() if _rounded(site, facts.gradients.get(name))]
    if not lost:
        if any(site.rows >= LASTING for site in facts.updates.values()):
            most = max(site.zeros / max(1, site.elements) for site in facts.updates.values())
            yield Clear(
                f"0 of {len(facts.updates)} parameters with a gradient stand still; at most {most:.0%} of the elements do"
            )
        return
    size = {name: int(np.prod(described["shape"])) for name, described in facts.described.items()}
    share = sum(size.get(site.name, 0) for site in lost) / max(1, sum(size.get(name, 0) for name in facts.trainable))
    names = [site.name for site in lost]
    yield Found(
        "warning" if share >= 0.5 else "info",
        f"the updates of {listed(names)} are rounded away: {lost[0].zeros / lost[0].elements:.0%} of the elements of "
        f"{names[0]} ({lost[0].dtype}) keep their bits in every step",
        min(site.first_step for site in lost),
        names[0],
        {
            "params": names,
            "cause": LOW_PRECISION.get(lost[0].dtype, "resolution"),
            "count": len(names),
            "share_of_elements": round(share, 4),
        },
    )


def _rounded(update: Seen, gradient: Seen | None) -> bool:
    if gradient is None or update.rows < LASTING or not gradient.elements or not update.elements:
        return False
    moved_at_least = 1 - gradient.zeros / gradient.elements
    return moved_at_least > 0.5 and update.zeros >= ROUNDED_AWAY * update.elements


def _nonfinite_gradients(facts: Facts, step: int) -> list[str]:
    rows = facts.sql(
        "SELECT DISTINCT module::VARCHAR AS module, slot::VARCHAR AS slot FROM tensors "
        f"WHERE step = {int(step)} AND phase::VARCHAR = 'gradient' AND nan + posinf + neginf > 0"
    ).to_pylist()
    return sorted(f"{row['module']}.{row['slot']}".lstrip(".") for row in rows)


RULES = (amp_skipped_steps, clip_on_scaled_grads, update_rounded_away)
