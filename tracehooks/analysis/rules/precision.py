"""Mixed and low precision: loss scaling, clipping in the wrong place, updates that are rounded away."""

from __future__ import annotations

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts, Seen
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule
from tracehooks.analysis.rules.series import running
from tracehooks.analysis.rules.updates import stands_still
from tracehooks.core.records import Severity

SKIPPED_RUNNING = 5
SKIPPED_SHARE = 0.1
ROUNDED_AWAY = 0.99
COLLAPSED = 1.0
UNDERFLOWS = 0.5
SMALLEST_NORMAL = 2.0**-14
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
    at_the_end = running(missed)
    after_first = missed[int(np.argmin(missed)) :] if not missed.all() else missed[:0]
    ends_so = at_the_end >= SKIPPED_RUNNING
    if not ends_so and not (after_first.sum() >= SKIPPED_RUNNING and after_first.mean() > SKIPPED_SHARE):
        yield Clear(f"{len(skipped)} of {len(tried)} optimizer steps were skipped, {at_the_end} of them at the end")
        return
    scale = facts.scalar("scale").values
    params = _nonfinite_gradients(facts, skipped[-1])
    yield Found(
        "error",
        f"{len(skipped)} of {len(tried)} optimizer steps were skipped because of gradients that are not finite; the loss "
        f"scale went from {scale[0]:g} to {scale[-1]:g}, non-finite at the last: {listed(params) or 'not recorded'}",
        int(tried[len(tried) - at_the_end]) if ends_so else skipped[0],
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
    threshold="the scaler had not unscaled them before its step, and their scaled norm is one and the same number, to "
    "0.1 %, in at least half of the steps and three of them",
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
    lost = [site for site in facts.updates.values() if _rounded(facts, site)]
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


def _rounded(facts: Facts, update: Seen) -> bool:
    gradient = facts.gradients.get(update.name)
    if (
        gradient is None
        or stands_still(facts, update)
        or update.rows < LASTING
        or not gradient.elements
        or not update.elements
    ):
        return False
    moved_at_least = 1 - gradient.zeros / gradient.elements
    return moved_at_least > 0.5 and update.zeros >= ROUNDED_AWAY * update.elements


@rule(
    sees="a loss scale that has collapsed",
    threshold=f"it ends below {COLLAPSED:g} after it was {COLLAPSED:g} or more: gradients overflow at every scale",
    source="torch.amp.GradScaler halves the scale at each overflow and begins at 65536; gradients of float16 below "
    "6e-8 are zero",
    needs=needs.SCALER,
    next_check="tracehooks first RUN: which gradient is not finite, and is it so in full precision?",
    evidence=("scale_start", "scale_end", "count", "cause"),
    causes=("overflow_at_every_scale",),
)
def scale_collapsed(facts: Facts) -> Answers:
    scale = facts.scalar("scale")
    if not len(scale.values):
        return
    first, last = float(scale.values.max()), float(scale.values[-1])
    if last < COLLAPSED <= first:
        text = f"the loss scale fell from {first:g} to {last:g}"
        evidence = {
            "scale_start": first,
            "scale_end": last,
            "count": len(scale.values),
            "cause": "overflow_at_every_scale",
        }
        yield Found("error", text, int(scale.steps[int(np.argmax(scale.values < COLLAPSED))]), "", evidence)
    yield Clear(f"the loss scale went from {scale.values[0]:g} to {last:g}")


@rule(
    sees="gradients of float16 that are too small for it: most of them are zero or have lost their bits",
    threshold=f"of the gradients of outputs in float16 {UNDERFLOWS:.0%} or more have a magnitude of at most "
    f"{SMALLEST_NORMAL:.1e} in all of {LASTING} or more steps, or nothing but zeros",
    source="Micikevicius et al., 2018, Mixed precision training: magnitudes below 2⁻²⁴ are zero in float16, below "
    "2⁻¹⁴ inexact; loss scaling moves them up",
    needs='gradients of outputs in float16: "output_grads" in record=, and a model that computes in it',
    next_check="scale the loss (torch.amp.GradScaler), or compute in bfloat16",
    evidence=("modules", "count", "share", "cause"),
    causes=("no_loss_scale", "scale_too_small"),
)
def gradient_underflow(facts: Facts) -> Answers:
    half = [
        site for site in facts.of_phase("backward") if site.dtype == "float16" and site.rows >= LASTING and site.count
    ]
    tiny = [site for site in half if (site.absmax or 0.0) <= SMALLEST_NORMAL]
    share = len(tiny) / max(1, len(half))
    if half and share >= UNDERFLOWS and any(site.last_nonzero is not None for site in half):
        modules = list(dict.fromkeys(site.module for site in tiny))
        text = f"{len(tiny)} of {len(half)} gradients of outputs in float16 are below its normal numbers"
        scaled = len(facts.scalar("scale").values) > 0
        evidence = {"modules": modules, "count": len(tiny), "share": share,
                    "cause": "scale_too_small" if scaled else "no_loss_scale"}  # fmt: skip
        yield Found("warning", text, facts.run_start, modules[0], evidence)
    if facts.of_phase("backward"):
        yield Clear(f"{len(tiny)} of {len(half)} gradients of outputs in float16 are below its normal numbers")


@rule(
    sees="modules that compute in another dtype than is meant: norms and softmax in float16, or float64 by accident",
    threshold="outputs of a normalisation or softmax in float16 while the parameters are float32; or outputs in "
    "float64 while the parameters are narrower, a note",
    source="torch.amp, op reference: layer_norm, softmax and losses run in float32 under autocast; NumPy makes float64",
    needs=needs.OUTPUTS,
    next_check="which cast, or which array of NumPy's, brings the dtype in?",
    evidence=("modules", "dtype", "count", "cause"),
    causes=("norm_in_float16", "float64_by_accident"),
)
def wrong_dtype(facts: Facts) -> Answers:
    kinds = {site.dtype for site in facts.of_phase("parameter") if "float" in site.dtype}
    outputs = facts.of_phase("forward")
    if not kinds or not outputs:
        return
    wide = [site for site in outputs if site.dtype == "float64"] if "float64" not in kinds else []
    narrow = (
        [site for site in outputs if site.dtype == "float16" and _wants_float32(site)] if kinds == {"float32"} else []
    )
    for sites, cause, what in (
        (narrow, "norm_in_float16", "a norm or softmax"),
        (wide, "float64_by_accident", "an output"),
    ):
        if sites:
            modules = list(dict.fromkeys(site.module for site in sites))
            evidence = {"modules": modules, "dtype": sites[0].dtype, "count": len(modules), "cause": cause}
            text = f"{listed(modules)}: {what} in {sites[0].dtype} while parameters are {', '.join(sorted(kinds))}"
            severity: Severity = "warning" if sites is narrow else "info"
            yield Found(severity, text, sites[0].first_step, modules[0], evidence)
    yield Clear(f"{len(wide) + len(narrow)} of {len(outputs)} outputs have a dtype that the parameters do not call for")


def _wants_float32(site: Seen) -> bool:
    return any(part in site.type for part in ("LayerNorm", "RMSNorm", "GroupNorm", "Softmax"))


def _nonfinite_gradients(facts: Facts, step: int) -> list[str]:
    rows = facts.sql(
        "SELECT DISTINCT module::VARCHAR AS module, slot::VARCHAR AS slot FROM tensors "
        f"WHERE step = {int(step)} AND phase::VARCHAR = 'gradient' AND nan + posinf + neginf > 0"
    ).to_pylist()
    return sorted(f"{row['module']}.{row['slot']}".lstrip(".") for row in rows)


RULES = (
    amp_skipped_steps,
    scale_collapsed,
    clip_on_scaled_grads,
    gradient_underflow,
    wrong_dtype,
    update_rounded_away,
)
