"""The trace format, version 1, as data: tables, columns, phases, event kinds and the fields of run.json.

Storage builds its Arrow schemas from this page, docs/trace-format.md is tested against it, and nothing else in the
package spells a column's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

FORMAT_VERSION = 1

SKETCH_SIZE = 16
"""Signed sums in a sketch."""

HISTOGRAM_EXPONENTS = tuple(range(-32, 32))
"""Bucket b counts elements with 2**e <= |x| < 2**(e+1); the first and last bucket also hold what lies beyond. Zeros and
non-finite elements are in no bucket (they have columns of their own)."""

ColumnType = Literal[
    "int64", "int32", "uint64", "float64", "bool", "string", "dictionary", "list<int64>", "sketch", "histogram"
]


@dataclass(frozen=True)
class Column:
    """One column. ``dictionary`` is a string stored dictionary-encoded, ``sketch`` a fixed_size_list<float32>."""

    name: str
    type: ColumnType
    meaning: str
    nullable: bool = False


@dataclass(frozen=True)
class Table:
    """One table of a run: a directory of Parquet parts beside run.json."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Column names in file order."""
        return tuple(column.name for column in self.columns)


_WHEN = (
    Column("step", "int64", "number of the training step, from 0"),
    Column("micro", "int32", "number of the forward pass inside the step, from 0 (gradient accumulation, evaluation)"),
    Column("time_ns", "int64", "Unix time in nanoseconds"),
)
_SEQ = Column("seq", "int64", "order of observation inside the step, over all phases: the execution order")

TENSORS = Table(
    "tensors",
    "one row for each tensor seen at one site in one step",
    (
        *_WHEN,
        _SEQ,
        Column("phase", "dictionary", "what the tensor is: see the list of phases"),
        Column("module", "dictionary", "canonical module path; empty for the root"),
        Column("type", "dictionary", "the module's class name, or the op's name for phase op"),
        Column("slot", "dictionary", "which tensor of the site: output, output.0, input.mask, weight …"),
        Column("call", "int32", "n-th call of this module in this forward pass, from 0"),
        Column("recompute", "bool", "seen again while activation checkpointing recomputed the forward pass"),
        Column("dtype", "dictionary", "as torch prints it, without torch."),
        Column("device", "dictionary", "as torch prints it"),
        Column("shape", "list<int64>", "logical shape; of the local shard for a sharded tensor"),
        Column(
            "count",
            "int64",
            "elements measured: components of a complex tensor, stored values of a sparse one, "
            "the sample of an update; otherwise the product of the shape",
        ),
        Column("nan", "int64", "elements that are NaN"),
        Column("posinf", "int64", "elements that are +inf"),
        Column("neginf", "int64", "elements that are -inf"),
        Column("zeros", "int64", "elements that are zero"),
        Column("min", "float64", "smallest finite element; null when none is finite", nullable=True),
        Column("max", "float64", "largest finite element; null when none is finite", nullable=True),
        Column("mean", "float64", "mean of the finite elements; null when none is finite", nullable=True),
        Column("std", "float64", "population standard deviation of the finite elements; null when none", nullable=True),
        Column(
            "rms", "float64", "sqrt(mean of squares) of the finite elements; null when none is finite", nullable=True
        ),
        Column(
            "absmax", "float64", "largest magnitude of the finite elements; null when none is finite", nullable=True
        ),
        Column("hash", "uint64", "content hash in logical order; null when hashing is off", nullable=True),
        Column("sketch", "sketch", "16 signed sums; null when not asked for", nullable=True),
        Column(
            "histogram", "histogram", "counts by power of two of the magnitude; null when not asked for", nullable=True
        ),
    ),
)

SCALARS = Table(
    "scalars",
    "numbers that belong to a step: loss, learning rate, loss scale, gradient norm, throughput, phase times",
    (
        *_WHEN,
        Column("name", "dictionary", "what it is, with / between parts"),
        Column("value", "float64", "the number"),
    ),
)

MASKS = Table(
    "masks",
    "one row for each mask seen: how much of it is empty",
    (
        *_WHEN,
        _SEQ,
        Column("module", "dictionary", "canonical module path; empty for the root"),
        Column("slot", "dictionary", "which argument, or the probe's name"),
        Column("shape", "list<int64>", "shape of the mask; the dimension that a probe names stands last"),
        Column("count", "int64", "elements"),
        Column("kept", "int64", "elements that are kept"),
        Column("rows", "int64", "rows: all dimensions but the last flattened"),
        Column("empty_rows", "int64", "rows that keep nothing"),
        Column("min_kept", "int64", "kept elements in the emptiest row; null when there are no rows", nullable=True),
        Column("max_kept", "int64", "kept elements in the fullest row; null when there are no rows", nullable=True),
        Column("first_empty", "int64", "flat index of the first empty row; null when none is empty", nullable=True),
        Column("convention", "dictionary", "keep=True, keep=False or additive"),
    ),
)

SAMPLES = Table(
    "samples",
    "one row for each training or validation sample: its fingerprint",
    (
        *_WHEN,
        Column("index", "int64", "position in the batch"),
        Column("name", "dictionary", "which input of the root"),
        Column("split", "dictionary", "train, validation or a name of the user's"),
        Column("hash", "uint64", "content hash of the sample"),
        Column("source_id", "string", "the user's own id of the sample; null when not given", nullable=True),
        Column(
            "sketch", "uint64", "64 signs of signed sums, for near-duplicates; null for small samples", nullable=True
        ),
    ),
)

EVENTS = Table(
    "events",
    "things that happened once",
    (
        *_WHEN,
        _SEQ,
        Column("kind", "dictionary", "see the list of kinds"),
        Column("severity", "dictionary", "info, warning or error"),
        Column("module", "dictionary", "canonical module path; null when the event has none", nullable=True),
        Column("slot", "dictionary", "which tensor of the site; null when the event has none", nullable=True),
        Column("message", "string", "one line for a person"),
        Column("details", "string", "JSON object whose keys are fixed per kind"),
    ),
)

TABLES: dict[str, Table] = {table.name: table for table in (TENSORS, SCALARS, MASKS, SAMPLES, EVENTS)}

PHASES: dict[str, str] = {
    "input": "an input of the root and, if asked, of other modules",
    "forward": "an output of a module",
    "backward": "d loss / d tensor of a forward or probe row",
    "probe": "a tensor handed to a probe",
    "parameter": "a parameter as the optimizer step found it",
    "buffer": "a buffer as the optimizer step found it",
    "gradient_local": "a parameter's gradient as accumulated on this rank, where no optimizer is seen",
    "gradient": "a parameter's gradient as the optimizer used it: reduced, unscaled, clipped",
    "update": "what the step did to a parameter: value after minus value before",
    "optimizer": "a tensor of the optimizer's state after the step",
    "op": "a tensor of a located op",
}

SPLITS = ("train", "validation")
SEVERITIES = ("info", "warning", "error")
STATUSES = ("running", "closed", "crashed")


@dataclass(frozen=True)
class EventKind:
    """A kind of event: what it means and the keys of its ``details``."""

    meaning: str
    details: tuple[str, ...] = ()


EVENT_KINDS: dict[str, EventKind] = {
    "nonfinite": EventKind(
        "the first non-finite value of the run; one of evaluation, and after it one of training",
        (
            "step",
            "phase",
            "module",
            "op",
            "value",
            "cause",
            "file",
            "line",
            "code",
            "params",
            "buffer",
            "inputs",
            "output",
            "message",
            "evaluation",
        ),
    ),
    "optimizer_step_skipped": EventKind(
        "a GradScaler found non-finite gradients and skipped the update", ("optimizer",)
    ),
    "recording_paced": EventKind(
        "which steps are recorded changed, to keep the budget",
        ("every", "recorded_seconds", "watched_seconds", "step_seconds", "budget"),
    ),
    "gradients_dropped": EventKind('gradients were dropped because of on_nonfinite="skip"', ("parameters",)),
    "recorder_error": EventKind(
        "an error inside the recorder, caught; said once for each place and kind", ("where", "error")
    ),
    "parameters_replaced": EventKind(
        "parameters were added, removed or replaced after attach", ("added", "removed", "replaced")
    ),
    "modules_changed": EventKind("modules were added or removed after attach and hooked anew", ("added", "removed")),
    "module_not_hooked": EventKind("a module that takes no hooks: it is opaque, its parents are recorded", ("reason",)),
    "training_mode": EventKind(
        "modules as a training pass found them: at the first, and whenever that changed", ("training", "evaluation")
    ),
    "trainable": EventKind(
        "parameters that require a gradient as a training pass found them: at the first, and whenever that changed",
        ("trainable", "frozen"),
    ),
    "unreached": EventKind(
        "no backward pass of the first steps reached these parameters though they require a gradient; the module is "
        "where the path ends",
        ("cause", "parameters"),
    ),
    "unregistered": EventKind(
        "tensors that require gradients and reach the loss but are no parameters of the model: those in one attribute, "
        "or in none",
        ("owner", "attribute", "names", "shapes", "count", "in_optimizer"),
    ),
    "gradient_lost": EventKind(
        "an autograd node that receives a gradient and sends zeros towards these parameters",
        ("op", "module", "shape", "dimension", "parameters"),
    ),
    "loss_broadcast": EventKind(
        "the loss compares one prediction a sample with one target a sample, all against all",
        ("op", "shapes", "result"),
    ),
    "loss_of_probabilities": EventKind(
        "a loss function that takes logits, or their log_softmax, was given probabilities", ("loss", "op")
    ),
    "inputs_taken": EventKind(
        "modules that are given an input of the root as it is, by the input's name, in the first pass", ("takers",)
    ),
    "data_loader": EventKind(
        "a data loader of the process, at the first backward pass and, where its epoch changed, at the end",
        ("number", "dataset", "samples", "batch_size", "workers", "sampler", "shuffle", "epoch"),
    ),
    "foreign_optimizer": EventKind(
        "no optimizer holds a parameter of the model, but one of the process holds tensors of the same shapes",
        ("optimizer", "shapes"),
    ),
    "graph_held": EventKind(
        "buffers, or tensors in attributes of modules, that hold the autograd graph that made them", ("buffers",)
    ),
    "average": EventKind(
        "buffers of the moving average that are at the end as they were at attach while the model's have changed",
        ("stale_buffers",),
    ),
    "checkpoint": EventKind("a state dict was kept", ("name", "tensors", "hash", "hashes", "shares_memory_with_model")),
    "note": EventKind("a note of the user's"),
    "verdict": EventKind(
        "what an experiment found: questions with their answers, and the numbers",
        ("title", "passed", "checks", "evidence"),
    ),
    "paused": EventKind("recording was paused"),
    "resumed": EventKind("recording went on after a pause"),
    "run_resumed": EventKind(
        "a process goes on recording in the directory of an earlier one, from this step on", ("step",)
    ),
    "exception": EventKind("the with-block of the trace ended with an exception", ("type",)),
}


@dataclass(frozen=True)
class Field:
    """One field of run.json. ``schema`` is its JSON schema fragment."""

    name: str
    schema: dict[str, Any]
    meaning: str
    required: bool = False


_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_INT = {"type": "integer"}
_OBJECT = {"type": "object"}

RUN_FIELDS: tuple[Field, ...] = (
    Field("format_version", {"type": "integer", "minimum": 1}, "version of this format", required=True),
    Field("run_id", _TEXT, "UUIDv7", required=True),
    Field("created", _TEXT, "UTC, RFC 3339", required=True),
    Field("closed", _MAYBE_TEXT, "UTC, RFC 3339; null while the run is not closed"),
    Field("status", {"enum": list(STATUSES)}, "running, closed or crashed", required=True),
    Field("command", {"type": "array", "items": _TEXT}, "command line"),
    Field(
        "git",
        {"type": ["object", "null"]},
        "commit, branch, dirty, diff_sha256 of the working directory; null outside git",
    ),
    Field("packages", _OBJECT, "versions: python, torch, cuda, cudnn, numpy, tracehooks"),
    Field("host", _TEXT, "host name"),
    Field("pid", _INT, "process id of rank 0"),
    Field("devices", {"type": "array", "items": _TEXT}, "device names"),
    Field("world_size", {"type": "integer", "minimum": 1}, "number of ranks"),
    Field(
        "model",
        _OBJECT,
        "class, digest of the module tree, parameter_count, modules, parameters, buffers, wrappers around it",
    ),
    Field("flags", _OBJECT, "seed, determinism, TF32, autocast dtype, threads"),
    Field("optimizers", {"type": "array", "items": _OBJECT}, "class and hyper-parameters of each optimizer seen"),
    Field("config", _OBJECT, "the recording configuration", required=True),
    Field(
        "histogram_exponents",
        {"type": "array", "items": _INT},
        "lower edges of the histogram's buckets, as powers of two",
    ),
    Field("notes", {"type": "array", "items": _TEXT}, "free text"),
)


def run_json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of run.json. Unknown fields are allowed: later versions add some."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tracehooks run.json",
        "type": "object",
        "properties": {field.name: {**field.schema, "description": field.meaning} for field in RUN_FIELDS},
        "required": [field.name for field in RUN_FIELDS if field.required],
    }
