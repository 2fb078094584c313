"""A symptom as the entry: the causes that can bring it about, in the order in which to look, and what tells of each.

A cause is seen by rules; where none can see it, an experiment or a look at the data tells. So each is found, ruled out with
the number that rules it out, or not known from this trace with what would make it known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from tracehooks.analysis import told
from tracehooks.analysis.rules import WEIGHT, judge
from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Judgement, Status
from tracehooks.core.errors import InvalidOptionError, UnknownNameError, shown
from tracehooks.core.records import Check, Finding, RunSource


@dataclass(frozen=True)
class Cause:
    """Something that can bring a symptom about."""

    says: str
    rules: tuple[str, ...] = ()
    ask: str = ""
    """What tells where no rule of the trace can: an experiment, or a look that only people can take."""
    asked: str = ""
    """Part of the question of an experiment that tells: where the trace keeps its verdict, that answers."""


@dataclass(frozen=True)
class Item:
    """One cause of a checklist, answered."""

    cause: str
    status: Status
    findings: tuple[Finding, ...]
    ruled_out: Mapping[str, str]
    """The number that rules it out, by the rule that looked."""
    missing: Mapping[str, str]
    """What to record, by the rule that lacks it."""
    ask: str


@dataclass(frozen=True)
class Checklist:
    """The causes of a symptom: those found first, the worst before, then those not known, then those ruled out."""

    symptom: str
    meaning: str
    items: tuple[Item, ...]

    def of(self, status: Status) -> tuple[Item, ...]:
        """Those that were answered so."""
        return tuple(item for item in self.items if item.status == status)

    def __str__(self) -> str:
        return "\n".join(told.causes(self))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything found, in order."""
        return tuple(finding for item in self.items for finding in item.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        items = [{**vars(item), "findings": [asdict(finding) for finding in item.findings]} for item in self.items]
        return {"symptom": self.symptom, "meaning": self.meaning, "items": items}


def checklist(run: RunSource, symptom: str, control: RunSource | None = None) -> Checklist:
    """The checklist of one symptom for one run.

    Args:
        symptom: one of `SYMPTOMS`.
        control: a run that is known to be fine; what is found there as well, at the same site, is left out.

    Raises:
        UnknownNameError: no such symptom; the nearest are listed.
        InvalidOptionError: a symptom that is no text.
    """
    if not isinstance(symptom, str):
        raise InvalidOptionError("symptom", shown(symptom), f"one of {', '.join(SYMPTOMS)}")
    if symptom not in SYMPTOMS:
        raise UnknownNameError("symptom", symptom, SYMPTOMS, "diagnose")
    meaning, causes = SYMPTOMS[symptom]
    judgements = {judgement.rule.name: judgement for judgement in judge(run, control)}
    asked = list(_asked(Facts(run)))
    items = [_answered(cause, [judgements[name] for name in cause.rules], asked) for cause in causes]
    return Checklist(symptom, meaning, tuple(sorted(items, key=_place)))


def _asked(facts: Facts) -> Iterator[tuple[str, int, Check]]:
    """The questions of experiments whose verdicts the trace keeps: which experiment, when, question and answer."""
    for event in facts.events("verdict"):
        for check in event.details.get("checks") or ():
            yield event.details["title"], event.step, Check(check["question"], check["passed"], check["answer"])


def _answered(cause: Cause, judgements: Sequence[Judgement], asked: Sequence[tuple[str, int, Check]]) -> Item:
    answers = [one for one in asked if cause.asked and cause.asked in one[2].question]
    failed = (
        Finding("verdict", "warning", step, "", f"{title}: {check}", {}, cause.ask)
        for title, step, check in answers
        if check.passed is False
    )
    findings = (*(finding for judgement in judgements for finding in judgement.findings), *failed)
    ruled_out = {judgement.rule.name: judgement.because for judgement in judgements if judgement.because}
    ruled_out |= {title: str(check) for title, _, check in answers if check.passed}
    missing = {judgement.rule.name: judgement.rule.needs for judgement in judgements if judgement.status == "not known"}
    status: Status = "found" if findings else "ruled out" if ruled_out and not missing else "not known"
    worst = sorted(findings, key=lambda finding: WEIGHT[finding.severity])
    return Item(cause.says, status, tuple(worst), ruled_out, missing, cause.ask)


def _place(item: Item) -> tuple[int, int]:
    worst = min((WEIGHT[finding.severity] for finding in item.findings), default=0)
    return ("found", "not known", "ruled out").index(item.status), worst


def symptoms_of(rule: str) -> list[str]:
    """The symptoms on whose checklists a rule stands."""
    return [name for name, (_, causes) in SYMPTOMS.items() if any(rule in cause.rules for cause in causes)]


_OVERFIT = "tracehooks.experiments.overfit(model, loss_fn, batch)"
_INFLUENCE = "tracehooks.experiments.influence(model, batch, inputs)"

_FLAT_LOSS = (
    Cause("the loss really is flat", ("loss_not_decreasing",)),
    Cause("the learning rate is zero, or too small for the parameters", ("zero_lr", "update_ratio", "clipped_away")),
    Cause(
        "parameters are frozen, or no optimizer holds them",
        ("param_not_in_optimizer", "unregistered_params", "unused_params"),
    ),
    Cause(
        "gradients are missing, zero, or fade",
        ("detached", "integer_conversion", "zero_gradient", "vanishing_gradients", "grads_not_zeroed"),
    ),
    Cause(
        "the optimizer's step is skipped, or does nothing",
        ("optimizer_step_skipped", "amp_skipped_steps", "clip_on_scaled_grads", "update_rounded_away"),
    ),
    Cause(
        "targets are constant, unbalanced, confused, or belong to other positions",
        ("constant_targets", "misaligned_targets", "class_imbalance", "confusion"),
    ),
    Cause("targets are random", (), f"{_OVERFIT}: do the targets hold something to learn?", "hold something to learn"),
    Cause("nothing, or nearly nothing, counts in the loss", ("empty_mask", "nearly_empty_mask", "inverted_mask")),
    Cause(
        "the loss does not measure what the model says",
        ("output_not_in_loss", "loss_broadcast", "double_softmax"),
        asked="depend on the predictions",
    ),
    Cause("the same predictions are used again", ("stale_output",)),
    Cause(
        "units are dead, saturated or constant",
        ("dead_activations", "partly_dead_units", "saturation", "constant_activations", "dead_modules"),
    ),
    Cause("the weights begin badly", ("poor_initialisation", "tensor_variance", "padding_row_nonzero")),
    Cause("the same data comes again and again", ("repeated_batch", "same_order_each_epoch")),
    Cause("inputs are out of range, or move", ("unnormalised_images", "input_drift", "nonfinite")),
    Cause("training is unstable", ("exploding_gradients", "exploding_logits", "logit_scale_at_clamp")),
    Cause("modules are in the wrong mode", ("eval_mode_in_training",)),
    Cause(
        "the model lacks the capacity",
        (),
        f"{_OVERFIT}: whether it can represent one small batch",
        "represent the task",
    ),
)

_NAN = (
    Cause(
        "a value that is not finite was born: arithmetic, an empty mask, overflow, data, damaged weights",
        ("nonfinite",),
    ),
    Cause("gradients or updates grow out of bounds", ("exploding_gradients", "update_ratio", "grads_not_zeroed")),
    Cause("lower precision is unstable", ("amp_skipped_steps", "scale_collapsed", "gradient_underflow", "wrong_dtype")),
    Cause("it would be finite in full precision", (), "tracehooks.experiments.precision(model, loss_fn, batch) tells"),
    Cause("logits, or their scale, explode", ("exploding_logits", "logit_scale_at_clamp")),
    Cause("masks are empty, or leave whole rows without anything", ("empty_mask", "masked_rows", "nearly_empty_mask")),
    Cause("inputs are out of range, or move", ("unnormalised_images", "input_drift", "out_of_vocabulary")),
    Cause("the weights begin badly", ("poor_initialisation",)),
    Cause("a resumed run lost its optimizer's state, or jumped in its rate", ("optimizer_state_missing", "lr_jump")),
)

_REPETITION = (
    Cause(
        "data comes again and again",
        ("repeated_batch", "same_order_each_epoch", "duplicate_augmentation"),
    ),
    Cause("generated tokens repeat, or are few", ("repetition",)),
    Cause("the stop token is never reached", ("stop_never_reached",)),
    Cause("the model was trained too long, or on too little", ("overfitting", "overtraining")),
    Cause("contexts are short, or mostly padding", ("padding_share",)),
    Cause("predictions are the same for everything", ("stale_output", "class_imbalance")),
    Cause(
        "sampling is greedy, cold or narrow",
        (),
        "generate with several temperatures, top-k and top-p, and compare tracehooks.tokens(ids, name) of each",
    ),
    Cause("training examples are copied", (), "compare what was generated with its nearest training examples"),
)

_SILENCE = (
    Cause("audio is silent or clipped in some stage, from the source to the file", ("silent_audio", "clipped_audio")),
    Cause("tokens are invalid, or one token in all", ("out_of_vocabulary", "repetition", "stop_never_reached")),
    Cause("values are not finite", ("nonfinite",)),
    Cause("activations are zero or constant", ("dead_activations", "constant_activations", "saturation")),
    Cause("padding is not silent, or fills the input", ("padding_row_nonzero", "padding_share", "masked_rows")),
    Cause("the input moves away from its range", ("input_drift",)),
    Cause(
        "channels cancel, codebooks are in the wrong order, or the file has another sample rate",
        (),
        "tracehooks.audio(x, name) after each stage of decoding and writing, and listen to the file",
    ),
)

_IGNORES_CONDITION = (
    Cause("the condition is absent, or never varies", ("condition_absent", "constant_input")),
    Cause("it is truncated or empty after tokenisation", ("condition_truncated", "masked_rows", "out_of_vocabulary")),
    Cause("it is dropped more often than intended", ("condition_dropped",)),
    Cause("its encoder is frozen or detached", ("condition_frozen", "detached", "integer_conversion")),
    Cause("the fusion does not use it", ("unused_params", "param_not_in_optimizer", "constant_activations")),
    Cause("no gradient reaches its path", ("zero_gradient",)),
    Cause(
        "it does not move the output",
        (),
        f"{_INFLUENCE}: permuted, dropped and zeroed, a number each",
        "move the output",
    ),
    Cause(
        "it is paired with the wrong target, or says nothing of it",
        (),
        f"print some pairs; {_OVERFIT} with the conditions permuted: is the loss the same?",
    ),
    Cause("guidance or sampling is unsuitable, or the prompt unlike the training data", (), "vary both, one at a time"),
)

_SLOW = (
    Cause("training waits for its data", ("stall",)),
    Cause("a rank is slower than the others, or silent", ("slow_rank", "silent_rank")),
    Cause("a compiled model is compiled again and again", ("recompilation",)),
    Cause("memory or the graph grows", ("memory_growth", "graph_growth")),
    Cause("checkpoints pause the training", ("checkpoint_pause",)),
    Cause("computation is in a wider dtype than meant", ("wrong_dtype",)),
    Cause("positions are mostly padding", ("padding_share",)),
    Cause("steps are skipped", ("amp_skipped_steps",)),
    Cause("one operation is expensive", (), "torch.profiler around a few steps: which op takes the time"),
)

_TOO_GOOD = (
    Cause("validation samples are training samples", ("split_overlap",)),
    Cause("nearly the same samples are in both splits", ("near_duplicates",)),
    Cause("one source, or overlapping windows of it, is in both splits", ("source_overlap",)),
    Cause("samples come again and again", ("repeated_batch", "duplicate_augmentation", "same_order_each_epoch")),
    Cause("targets are constant, or one class is nearly everything", ("constant_targets", "class_imbalance")),
    Cause(
        "what is evaluated is not what was trained", ("aliased_snapshot", "ema_buffers_stale", "eval_mode_in_training")
    ),
    Cause("the model was trained too long", ("overfitting", "overtraining")),
    Cause(
        "features were cached, or normalisation fitted, before the split",
        (),
        "split by source first, fit on the training split alone, and compare",
    ),
    Cause("the test set chose the model", (), "count how often its result decided something"),
)

SYMPTOMS: Mapping[str, tuple[str, tuple[Cause, ...]]] = MappingProxyType(
    {
        "flat-loss": ("the loss does not decrease", _FLAT_LOSS),
        "nan": ("loss, gradients or weights are not finite", _NAN),
        "repetition": ("generated output repeats itself", _REPETITION),
        "silence": ("generated output is silent, or nearly", _SILENCE),
        "ignores-condition": ("captions or controls make no difference", _IGNORES_CONDITION),
        "slow": ("training is slow, or stands still", _SLOW),
        "too-good": ("validation results are suspiciously good", _TOO_GOOD),
    }
)
"""Each symptom's meaning and its causes, in the order in which to look."""
