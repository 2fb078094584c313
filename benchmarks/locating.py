"""Who names the first non-finite value: tracehooks, four other tools and a hand-written hook on the same failures.

    python -m benchmarks.locating [--part cases,cost,locate] [--tools tracehooks,...] [--workload gpt,mlp] [--rounds 3]

Cases: the failures of tests/locate/failures.py and three of other tools' comparisons, planted here (an infinite weight,
a log of zero between two submodules, a root that is finite forward and not backward). Every tool watches every case in a
process of its own, from step 0 to the failing step. A case is *found* when the tool reports at the failing step, and
nothing before it; module, op, line and cause count only when they are the true ones, where the case has them. What is
healthy and full of infinities must not be reported: each report is a false alarm.

Cost: time of a step with the tool over that without, tool and bare in turns, the median over rounds; a tool that
cannot be taken off has its bare steps in a second process. Locating: time of the failing step less an ordinary one, in
ordinary steps. Absolute times are not to be compared between machines.

Prints JSON lines, the machine first, and a table on stderr at the end. A tool that is not installed is listed as such.
Nothing is reported unless tracehooks locates three failures rightly.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import linecache
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tracehooks
from benchmarks.machine import describe_machine
from benchmarks.overhead import WORKLOADS, Attention
from tests.locate.failures import FAILURES, Built, Failure

OUTSIDE = "(outside the model)"
PATIENCE = 600.0
"""Seconds for one answer of a worker."""

Train = Callable[[int], Any]


# ---- cases


class Unit(nn.Module):
    """Two layers with a residual, and between them what goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.fault == "logarithm":
            hidden = torch.log(torch.relu(hidden) * 0)
        if self.fault == "root":
            hidden = torch.sqrt(hidden * 0)
        return x + self.second(hidden)


class Stack(nn.Module):
    """Six units and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Unit() for _ in range(6)), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def planted(plant: Callable[[Any], None]) -> Callable[[], Built]:
    """Trains a `Stack`; the fault is put in before step 1."""

    def build() -> Built:
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        x, y = torch.randn(8, 16), torch.randint(0, 10, (8,))

        def step(i: int) -> None:
            if i == 1:
                plant(model.blocks)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        return model, optimizer, step

    return build


def _infinite_weight(blocks: Any) -> None:
    with torch.no_grad():
        blocks[3].first.weight[0, 0] = torch.inf


def _logarithm(blocks: Any) -> None:
    blocks[2].fault = "logarithm"


def _root(blocks: Any) -> None:
    blocks[5].fault = "root"


THREE = [
    Failure(
        "infinite_weight", planted(_infinite_weight), "update", "blocks.3.first", None, "inf", ("poisoned_parameter",)
    ),
    Failure(
        "logarithm_between_submodules", planted(_logarithm), "forward", "blocks.2", "aten.log.default", "-inf",
        ("log_of_zero",), "torch.log(",
    ),
    Failure(
        "root_finite_forward", planted(_root), "backward", "blocks.5", "SqrtBackward0", "inf",
        ("sqrt_at_zero",), "torch.sqrt(",
    ),
]  # fmt: skip
CASES = [*FAILURES, *THREE]


class Masking(nn.Module):
    """Attention with a mask of -inf held in a buffer, padding filled with -inf, and its masked scores as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("causal", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("padding", torch.arange(5) >= torch.tensor([[5], [3]]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.mix(x) @ x.transpose(1, 2) + self.causal
        scores = scores.masked_fill(self.padding[:, None, :], -torch.inf)
        return scores.softmax(-1) @ x, scores


class LogSpace(nn.Module):
    """Sums over paths in log space: states that cannot be reached are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.moves, self.read = nn.Parameter(torch.zeros(3, 3)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.log(torch.tensor([1.0, 0.0, 0.0])).expand(len(x), 3)
        moves = torch.log_softmax(self.moves, -1)
        for score in self.read(x).unbind(1):
            state = torch.logsumexp(state[:, :, None] + moves, 1) + score
        return torch.logsumexp(state, -1)


class Extremes(nn.Module):
    """The smallest and the largest value so far, in buffers that start infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        self.low, self.high = torch.minimum(self.low, x.min()), torch.maximum(self.high, x.max())
        return self.layer((x - self.low) / (self.high - self.low + 1))


def healthy(module: Callable[[], nn.Module]) -> Callable[[], Built]:
    """Trains a module that is well."""

    def build() -> Built:
        model = module()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(i: int) -> None:
            optimizer.zero_grad()
            output = model(torch.randn(2, 5, 4))
            (output[0] if isinstance(output, tuple) else output).square().mean().backward()
            optimizer.step()

        return model, optimizer, step

    return build


CONTROLS = [
    Failure(name, healthy(module), "", None, None, "", (), step=2)
    for name, module in {"masks": Masking, "log_space": LogSpace, "infinite_buffers": Extremes}.items()
]


# ---- tools


@dataclass(frozen=True)
class Named:
    """What a tool said of the first non-finite value; None where it does not say."""

    step: int
    module: str | None = None
    """Its path, "" for the root, `OUTSIDE`."""
    op: str | None = None
    file: str | None = None
    line: int | None = None
    cause: str | None = None


class Tool:
    """A tool at work on a model from its making to `close`; this one is none."""

    needs: str | None = None
    """The package it comes from, where that is not torch or this one."""
    alone = False
    """Whether a process can use it on one model only."""
    removable = True
    """Whether `close` takes it off, leaving the model and torch as they were."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.found: Named | None = None
        self.now = 0

    def step(self, i: int, train: Train) -> None:
        """Train once under the tool."""
        self.now = i
        train(i)

    def close(self) -> None:
        """Take it off; `found` is what it said."""


class Tracehooks(Tool):
    """This library, everything recorded at every step."""

    every = 1

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        self.trace = tracehooks.attach(model, folder / "run", optimizer=optimizer, quiet=True, every=self.every)

    def close(self) -> None:
        self.trace.close()
        first = tracehooks.open(self.folder / "run").first_nonfinite
        if first is not None:
            module = OUTSIDE if first.module is None else first.module
            self.found = Named(first.step, module, first.op, first.file, first.line, first.cause)


class TracehooksWatch(Tracehooks):
    """This library, nothing recorded after step 0: the watch alone."""

    every = 10**9


class HandWritten(Tool):
    """What one writes when the loss is NaN: a hook on every module's output, and a look at the gradients."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        self.hooks: list[Any] = [optimizer.register_step_pre_hook(self.look_at_gradients)]
        for path, module in model.named_modules():
            self.hooks.append(module.register_forward_hook(functools.partial(self.look_at_output, path)))

    def look_at_output(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        for x in output if isinstance(output, tuple) else (output,):
            if self.found is None and not torch.isfinite(x).all():
                self.found = Named(self.now, path)

    def look_at_gradients(self, *_: Any) -> None:
        for name, parameter in reversed(list(self.model.named_parameters())):
            if self.found is None and parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                self.found = Named(self.now, name.rpartition(".")[0])

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


class Anomaly(Tool):
    """torch.autograd.detect_anomaly around the step: an exception for NaN out of backward, the forward line in a warning."""

    def step(self, i: int, train: Train) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with torch.autograd.detect_anomaly():
                    train(i)
            except RuntimeError as error:
                node = re.match(r"Function '(\w+)' returned nan", str(error))
                if node is None:
                    raise
                places = [place for warning in said for place in _places(str(warning.message))]
                self.found = Named(i, None, node[1], *(places[-1] if places else (None, None)))


class UnderflowOverflow(Tool):
    """transformers' DebugUnderflowOverflow: it stops with an exception and prints the frames of the last modules."""

    needs = "transformers"
    removable = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        from transformers.debug_utils import DebugUnderflowOverflow

        self.debug = DebugUnderflowOverflow(model)

    def step(self, i: int, train: Train) -> None:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                train(i)
        except ValueError as error:
            if "inf/nan detected" not in str(error):
                raise
            frames = re.findall(r"^ {18}(\S*) (\w+)$", printed.getvalue(), re.MULTILINE)
            self.found = Named(i, frames[-1][0] if frames else None)


class Torchlens(Tool):
    """torchlens' find_nan on each batch as the model receives it, before the model's own forward pass."""

    needs = "torchlens"
    removable = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        import torchlens

        self.find = torchlens.debug.find_nan
        self.looking = False
        model.register_forward_pre_hook(self.look)

    def look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.looking:
            return
        self.looking = True
        with torch.random.fork_rng():
            told = self.find(module, args[0] if len(args) == 1 else list(args))
        self.looking = False
        if told.found and self.found is None:
            file, _, line = (told.source_line or "").rpartition(":")
            given = told.func_name == "none"  # an input or a buffer, not the result of an op
            place = (None, None) if given or not file else (file, int(line))
            module_path = told.module_address or ("" if given else None)
            self.found = Named(self.now, module_path, None if given else told.func_name, *place)


class Msprobe(Tool):
    """mindstudio-probe: statistics of all modules and functions dumped at every step, its overflow check afterwards."""

    needs = "mindstudio-probe"
    removable = False
    alone = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        from msprobe.pytorch import PrecisionDebugger

        options = {
            "task": "statistics", "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": "mix",
            "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        }  # fmt: skip
        (folder / "options.json").write_text(json.dumps(options))
        self.debugger = PrecisionDebugger(config_path=str(folder / "options.json"))

    def step(self, i: int, train: Train) -> None:
        self.debugger.start(model=self.model, rank_id=0)
        train(i)
        self.debugger.stop()
        self.debugger.step()

    def close(self) -> None:
        from msprobe.overflow_check.analyzer import OverFlowCheck

        steps = sorted((self.folder / "dump").glob("step*"), key=lambda path: int(path.name[4:]))
        for path in steps:
            OverFlowCheck(str(path), str(path / "answer")).analyze()
            for answer in (path / "answer").glob("*.json"):
                nodes = [node for nodes in json.loads(answer.read_text()).values() for node in nodes]
                self.found = self.read(int(path.name[4:]), nodes[0])
                return

    @staticmethod
    def read(step: int, node: Any) -> Named:
        """Its answer: the names of the op and of the modules around it, and the stack of the call."""
        modules = [
            found[1]
            for name in node["construct_info"]
            if (found := re.match(r"Module\.(.*)\.\w+\.(?:forward|backward)\.\d+$", name))
        ]
        op = re.match(r"(?!Module\.)\w+\.(\w+)\.", node["op_name"])
        places = [place for line in node["stack_info"] or [] for place in _places(line)]
        return Named(
            step, modules[-1] if modules else OUTSIDE, op[1] if op else None, *(places[0] if places else (None, None))
        )


TOOLS: dict[str, type[Tool]] = {
    "tracehooks": Tracehooks,
    "tracehooks, watch only": TracehooksWatch,
    "hand-written hook": HandWritten,
    "torch detect_anomaly": Anomaly,
    "transformers DebugUnderflowOverflow": UnderflowOverflow,
    "torchlens find_nan": Torchlens,
    "mindstudio-probe overflow check": Msprobe,
}


def _places(text: str) -> list[tuple[str, int]]:
    """Files and lines in a traceback, without those of packages."""
    found = [(file, int(line)) for file, line in re.findall(r'File "?([^",]+)"?, line (\d+)', text)]
    return [(file, line) for file, line in found if "/site-packages/" not in file]


def installed(tool: str) -> bool:
    """Whether the package it needs is there."""
    needs = TOOLS[tool].needs
    try:
        return needs is None or bool(metadata.version(needs))
    except metadata.PackageNotFoundError:
        return False


# ---- processes


class Worker:
    """A process that answers requests: what tools patch there stays there."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.locating", "--work"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def ask(self, do: str, **request: Any) -> Any:
        """The answer to a request; RuntimeError where there is none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        patience = threading.Timer(PATIENCE, self.process.kill)
        patience.start()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        patience.cancel()
        answer = json.loads(line) if line else {"error": "the process died, or was too slow"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]


def work() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tools print
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    able: dict[str, Callable[..., Any]] = {"watch": watch, "time": Stand().times, "locate": locating}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": able[request.pop("do")](**request)}
        except Exception as error:  # a tool may raise whatever it likes
            said = re.sub(r"/\S*/", "", str(error).partition("\n")[0])[:100]
            answer = {"error": f"{type(error).__name__}: {said}"}
        print(json.dumps(answer), file=answers, flush=True)


# ---- who finds what


def watch(tool: str, name: str) -> dict[str, Any] | None:
    """What a tool says of a case."""
    case = next(case for case in (*CASES, *CONTROLS) if case.name == name)
    torch.manual_seed(0)
    model, optimizer, train = case.build()
    with tempfile.TemporaryDirectory() as folder:
        watching = TOOLS[tool](model, optimizer, Path(folder))
        for i in range(case.step + 1):
            watching.step(i, train)
            if watching.found is not None:
                break
        watching.close()
    return None if watching.found is None else asdict(watching.found)


def score(case: Failure, named: Named | None) -> dict[str, bool | None]:
    """What is right of an answer; None for what the case does not have."""
    found = named is not None and named.step == case.step
    if named is None or not found:
        named = Named(-1)
    code = linecache.getline(named.file, named.line) if named.file and named.line else ""
    return {
        "found": found,
        "module": found and named.module == (OUTSIDE if case.module is None else case.module),
        "op": plain(named.op) in _same(plain(case.op)) if case.op else None,
        "line": bool(code) and case.code in code if case.code else None,
        "cause": named.cause in case.causes,
    }


def plain(op: str | None) -> str:
    """A tool's word for an operation, without what only its namespace adds: aten.log.default, LogBackward0, log."""
    name = (op or "").removeprefix("aten.").partition(".")[0]
    return re.sub(r"Backward\d*$", "", name).replace("_", "").lower()


def _same(op: str) -> set[str]:
    """The words that count for an operation."""
    return next((names for names in SYNONYMS if op in names), {op})


SYNONYMS = [
    {"addmm", "linear"},
    {"div", "truediv", "itruediv", "divide"},
    {"reciprocal", "rtruediv", "rdiv"},
    {"nllloss", "nlllossforward", "crossentropy", "crossentropyloss"},
    {"nativebatchnorm", "batchnorm"},
    {"linalgsvd", "svd"},
    {"pow", "ipow"},
]
QUESTIONS = ("found", "module", "op", "line", "cause")


def judge(tool: str, cases: list[Failure]) -> Iterator[dict[str, Any]]:
    """A line of the results for each case. The process is a new one after an error, or where the tool needs that."""
    worker = Worker()
    for case in cases:
        line: dict[str, Any] = {"tool": tool, "case" if case.phase else "control": case.name}
        try:
            told = worker.ask("watch", tool=tool, name=case.name)
        except RuntimeError as error:
            line["error"], told = str(error), None
        named = None if told is None else Named(**told)
        line["named"] = named and asdict(replace(named, file=named.file and Path(named.file).name))
        yield line | (score(case, named) if case.phase else {})
        if "error" in line or TOOLS[tool].alone:
            with worker:
                worker = Worker()
    with worker:
        pass


def cases_of(tool: str) -> Iterator[dict[str, Any]]:
    """A line for every case and every healthy control, then how many were right."""
    yield from (lines := list(judge(tool, CASES)))
    yield from (controls := list(judge(tool, CONTROLS)))
    yield {
        "tool": tool,
        "right": {question: sum(line[question] is True for line in lines) for question in QUESTIONS},
        "asked": {question: sum(line[question] is not None for line in lines) for question in QUESTIONS},
        "false_alarms": sum(line["named"] is not None for line in controls),
        "controls": len(controls),
        "errors": sum("error" in line for line in lines + controls),
    }


def correct() -> bool:
    """Whether tracehooks locates three failures of three phases, both when it records and when it only watches."""
    names = ("fully_masked_row", "root_at_zero", "mean_over_an_empty_mask")
    cases = [case for case in CASES if case.name in names]
    lines = [line for tool in ("tracehooks", "tracehooks, watch only") for line in judge(tool, cases)]
    return all(line[question] is not False for line in lines for question in QUESTIONS)


# ---- cost of a step


class Stand:
    """Times a workload's steps, on demand, in a worker."""

    def __init__(self) -> None:
        self.built: Built | None = None
        self.on: Tool | None = None
        """A tool that cannot be taken off."""

    def times(self, workload: str, tool: str, steps: int) -> tuple[float, float]:
        """Seconds of a step under a tool, by the clock and of processor time, medians. The tool's name is empty for none."""
        if self.built is None:
            self.built = trained(workload)
            self.built[2](0)
        model, optimizer, train = self.built
        watching = self.on
        if watching is None:
            self.folder = tempfile.TemporaryDirectory()
            watching = (TOOLS[tool] if tool else Tool)(model, optimizer, Path(self.folder.name))
        watching.step(0, train)  # what only the first step pays
        seconds = timed(watching, train, steps)
        if watching.removable:
            watching.close()
            self.folder.cleanup()
        else:
            self.on = watching
        return seconds


def timed(watching: Tool, train: Train, steps: int) -> tuple[float, float]:
    """Seconds of a step, by the clock and of processor time, medians."""
    clock, processor = [], []
    for i in range(1, steps + 1):
        start, used = time.perf_counter(), time.process_time()
        watching.step(i, train)
        clock.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return statistics.median(clock), statistics.median(processor)


def trained(workload: str) -> Built:
    """A workload of the overhead benchmark with its optimizer."""
    torch.manual_seed(0)
    model, loss = WORKLOADS[workload]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def train(i: int) -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return model, optimizer, train


def cost_of(tool: str, workload: str, rounds: int, steps: int) -> dict[str, Any]:
    """A step with the tool over bare steps before and after it."""
    bare, on = [], []
    with Worker() as worker, Worker() as other:
        without = worker if TOOLS[tool].removable else other
        try:
            bare.append(without.ask("time", workload=workload, tool="", steps=steps))
            for _ in range(rounds):
                on.append(worker.ask("time", workload=workload, tool=tool, steps=steps))
                bare.append(without.ask("time", workload=workload, tool="", steps=steps))
        except RuntimeError as error:
            return {"tool": tool, "workload": workload, "error": str(error)}
    ratios = [[2 * on[r][kind] / (bare[r][kind] + bare[r + 1][kind]) for r in range(rounds)] for kind in (0, 1)]
    return {
        "tool": tool,
        "workload": workload,
        "ratio": round(statistics.median(ratios[0]), 3),
        "low": round(min(ratios[0]), 3),
        "high": round(max(ratios[0]), 3),
        "processor_ratio": round(statistics.median(ratios[1]), 3),
        "bare_ms": round(1e3 * statistics.median(clock for clock, _ in bare), 1),
        "rounds": rounds,
    }


# ---- cost of locating


class Faulty(Attention):
    """A block of the gpt workload, with what goes wrong behind it."""

    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.fault == "forward":
            x = x + torch.log(torch.relu(x) * 0)
        if self.fault == "backward":
            x = x + torch.sqrt(x * 0)
        return x


def locating(fault: str) -> dict[str, float]:
    """Seconds of two ordinary steps and of one in which a failure is located, the watch alone on."""
    model, optimizer, train = trained("gpt")
    block: Any = model[3]
    block.__class__ = Faulty
    with tempfile.TemporaryDirectory() as folder:
        watching = TracehooksWatch(model, optimizer, Path(folder))
        watching.step(0, train)
        ordinary = timed(watching, train, 3)
        block.fault = fault
        failing = timed(watching, train, 1)
        watching.close()
    named = watching.found
    if named is None or (named.step, named.module) != (4, "3") or plain(named.op) not in ("log", "sqrt"):
        raise RuntimeError(f"the failure was not located rightly: {named}")
    return {"ordinary": ordinary[0], "failing": failing[0], "processor": failing[1] / ordinary[1] - 1}


def locate_cost(fault: str, repeats: int) -> dict[str, Any]:
    """What locating costs, in ordinary steps."""
    runs = []
    for _ in range(repeats):
        with Worker() as worker:
            runs.append(worker.ask("locate", fault=fault))
    extra = [run["failing"] / run["ordinary"] - 1 for run in runs]
    return {
        "locate": fault,
        "workload": "gpt",
        "steps": round(statistics.median(extra), 2),
        "low": round(min(extra), 2),
        "high": round(max(extra), 2),
        "processor_steps": round(statistics.median(run["processor"] for run in runs), 2),
        "ordinary_ms": round(1e3 * statistics.median(run["ordinary"] for run in runs), 1),
    }


# ---- the results


def table(lines: list[dict[str, Any]]) -> str:
    """The results for a reader."""
    tools = list(dict.fromkeys(line["tool"] for line in lines if "tool" in line))
    workloads = list(dict.fromkeys(line["workload"] for line in lines if "workload" in line and "tool" in line))
    rows = [["", *QUESTIONS, "false alarms", "errors", *(f"{workload} step" for workload in workloads)]]
    for tool in tools:
        about = [line for line in lines if line.get("tool") == tool]
        row = [tool]
        if any("missing" in line for line in about):
            rows.append([tool, "not installed"])
            continue
        counts = next((line for line in about if "right" in line), None)
        if counts is not None:
            row += [f"{counts['right'][question]}/{counts['asked'][question]}" for question in QUESTIONS]
            row += [f"{counts['false_alarms']}/{counts['controls']}", str(counts["errors"])]
        else:
            row += [""] * (len(QUESTIONS) + 2)
        for workload in workloads:
            line = next((line for line in about if line.get("workload") == workload), {})
            row.append(f"×{line['ratio']:.3g}" if "ratio" in line else line.get("error", ""))
        rows.append(row)
    text = [_laid_out(rows)]
    planted_names = [case.name for case in THREE]
    if any(line.get("case") in planted_names for line in lines):
        rows = [["", *planted_names]]
        for tool in tools:
            told = {line["case"]: _told(line) for line in lines if line.get("tool") == tool and "case" in line}
            rows.append([tool, *(told.get(name, "not installed") for name in planted_names)])
        text.append(_laid_out(rows))
    text.append("\n".join(f"locating in {x['locate']}: {x['steps']} ordinary steps" for x in lines if "locate" in x))
    return "\n\n".join(text)


MARKS = {True: "✔", False: "✘", None: ""}


def _told(line: dict[str, Any]) -> str:
    named = line.get("named")
    if named is None:
        return line.get("error", "not found")
    words = {"module": named["module"], "op": named["op"], "line": named["line"]}
    said = [f"{name} {word} {MARKS[line[name]]}".rstrip() for name, word in words.items() if word is not None]
    return ", ".join(said or ["step only"])


def _laid_out(rows: list[list[str]]) -> str:
    columns = range(max(map(len, rows)))
    widths = [max(len(row[c]) for row in rows if c < len(row)) for c in columns]
    return "\n".join("  ".join(cell.ljust(widths[c]) for c, cell in enumerate(row)).rstrip() for row in rows)


def main() -> None:
    """Check, watch, time, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", default="cases,cost,locate")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--workload", default="gpt,mlp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    parts = options.part.split(",")
    if not correct():
        sys.exit("tracehooks does not locate what it should: nothing is measured")
    lines: list[dict[str, Any]] = []

    def say(line: dict[str, Any]) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)

    tools = [tool for tool in options.tools if installed(tool)]
    packages = sorted({name for tool in tools if (name := TOOLS[tool].needs) is not None})
    say(describe_machine() | {name: metadata.version(name) for name in packages})
    for tool in options.tools:
        if tool not in tools:
            say({"tool": tool, "missing": f"{TOOLS[tool].needs} is not installed"})
        elif "cases" in parts:
            for line in cases_of(tool):
                say(line)
    if "cost" in parts:
        for workload in options.workload.split(","):
            for tool in tools:
                rounds = options.rounds * (3 if TOOLS[tool] is TracehooksWatch else 1)  # its target is one percent
                say(cost_of(tool, workload, rounds, 2 if workload == "gpt" else 10))
    if "locate" in parts:
        for fault in ("forward", "backward"):
            say(locate_cost(fault, 3))
    print(table(lines), file=sys.stderr)


if __name__ == "__main__":
    main()
