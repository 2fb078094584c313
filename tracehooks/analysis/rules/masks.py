"""Masks: what they leave of what they are laid on."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule

NEARLY_EMPTY = 0.02
ROW = 16
EMPTY_ROWS = 0.25
INVERTED = 0.5


@rule(
    sees="a mask over positions that keeps nearly nothing",
    threshold=f"in the median of {LASTING} or more passes less than {NEARLY_EMPTY:.0%} of the elements of a mask of "
    f"two dimensions, in rows of {ROW} or more; masks of queries against keys may well be so (a window) and are left "
    "out",
    source="masked language modelling keeps 15 % (Devlin et al., 2019), masked autoencoders 25 % (He et al., 2022)",
    needs=needs.MASKS,
    next_check="print one mask beside the lengths that it was made from",
    evidence=("slot", "share", "count", "cause"),
    causes=("keeps_nearly_nothing",),
)
def nearly_empty_mask(facts: Facts) -> Answers:
    for mask in of_positions(facts):
        if mask["passes"] >= LASTING and 0 < mask["share"] < NEARLY_EMPTY and mask["width"] >= ROW:
            text = (
                f"the mask {mask['slot']} keeps {mask['share']:.2%} of its elements in the median of "
                f"{mask['passes']} passes"
            )
            yield Found(
                "warning",
                text,
                mask["first"],
                mask["module"],
                _evidence(mask, share=mask["share"], cause="keeps_nearly_nothing"),
            )
        yield Clear(f"{mask['slot']} keeps {mask['share']:.0%} of its elements")


@rule(
    sees="samples of which a mask keeps nothing at all",
    threshold=f"at least {EMPTY_ROWS:.0%} of the rows of a mask of two dimensions over {LASTING} or more passes, but "
    "not all (empty_mask says that); a condition that is dropped for guidance is so for one sample in five to ten",
    source="Ho and Salimans, 2022: classifier-free guidance drops the condition of 10 % to 20 % of the samples",
    needs=needs.MASKS,
    next_check="look at the samples of first_empty: are they empty in the data, or emptied on the way?",
    evidence=("slot", "share", "count", "first_empty", "cause"),
    causes=("rows_without_anything",),
)
def masked_rows(facts: Facts) -> Answers:
    for mask in of_positions(facts):
        share = mask["empty_rows"] / max(1, mask["rows"])
        if mask["passes"] >= LASTING and EMPTY_ROWS <= share < 1:
            text = f"the mask {mask['slot']} keeps nothing of {mask['empty_rows']} of {mask['rows']} samples"
            evidence = _evidence(mask, share=share, first_empty=mask["first_empty"], cause="rows_without_anything")
            yield Found("warning", text, mask["first"], mask["module"], evidence)
        yield Clear(f"{mask['slot']} keeps nothing of {mask['empty_rows']} of {mask['rows']} samples")


@rule(
    sees="a mask that keeps what it should drop: padding in place of tokens",
    threshold=f"in the median it keeps more than {INVERTED:.0%} of the padding and less than {INVERTED:.0%} of the "
    "tokens beside it",
    source="conventions differ: True keeps in transformers, and drops in torch.nn.MultiheadAttention's key_padding_mask",
    needs="a mask of the root's beside tokens of the same shape, and an nn.Embedding with padding_idx; not of masks named "
    "after padding, such as padding_mask, in which some models keep what is True and others drop it",
    next_check="invert the mask (~mask), and compare the loss of one batch",
    evidence=("slot", "padding_kept", "tokens_kept", "count", "cause"),
    causes=("inverted",),
)
def inverted_mask(facts: Facts) -> Answers:
    for name, padding in facts.scalars("mask/padding_kept/").items():
        slot = name.removeprefix("mask/padding_kept/")
        tokens = facts.scalar(f"mask/tokens_kept/{slot}")
        dropped, kept = float(np.median(padding.values)), float(np.median(tokens.values)) if len(tokens.values) else 1.0
        if dropped > INVERTED > kept:
            text = f"the mask {slot} keeps {dropped:.0%} of the padding and {kept:.0%} of the tokens"
            evidence = {
                "slot": slot,
                "padding_kept": dropped,
                "tokens_kept": kept,
                "count": len(padding.values),
                "cause": "inverted",
            }
            yield Found("error", text, int(padding.steps[0]), slot, evidence)
        yield Clear(f"{slot} keeps {kept:.0%} of the tokens and {dropped:.0%} of the padding")


def of_positions(facts: Facts) -> list[dict[str, Any]]:
    """Masks of two dimensions, one row a sample, over all passes."""
    rows: list[dict[str, Any]] = facts.sql(
        "SELECT module::VARCHAR AS module, slot::VARCHAR AS slot, count(*) AS passes, min(step) AS first, "
        "median(kept / count) AS share, sum(rows)::BIGINT AS rows, sum(empty_rows)::BIGINT AS empty_rows, "
        "max(first_empty) AS first_empty, max(shape[2]) AS width "
        "FROM masks WHERE len(shape) = 2 AND shape[1] <> shape[2] AND count > 0 GROUP BY ALL ORDER BY module, slot"
    ).to_pylist()
    return rows


def _evidence(mask: dict[str, Any], **numbers: Any) -> dict[str, Any]:
    return {"slot": mask["slot"], "count": mask["passes"], **numbers}


RULES = (nearly_empty_mask, masked_rows, inverted_mask)
