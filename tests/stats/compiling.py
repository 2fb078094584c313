"""Compiles the kernel for GPUs that need not be there: ``python -m tests.stats.compiling [everything]``. Nothing is run."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tracehooks.stats import gpu, kernel

ONE = {"x": "i64", "count": "i64", "row": "i64", "parts": "i32", "scratch": "*i64", "counters": "*i32"}
LIST = {"table": "*i64", "length": "i32", "total": "i32", "scratch": "*i64", "counters": "*i32"}
CAPABILITIES = (80, 90)


def check(function: Any, signature: dict[str, str], constants: dict[str, int], capability: int) -> None:
    """Raises when it does not compile, or compiles to what it must not."""
    source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=gpu._limits())
    assert made.asm["cubin"]
    code = made.asm["ptx"]
    atomics = re.findall(r"^\s*(?:@\S+ )?((?:atom|red)\.\S+)", code, re.MULTILINE)
    assert any("global" in atomic for atomic in atomics)
    assert not any(re.search(r"f16|f32|f64", atomic) for atomic in atomics), atomics
    assert ".ftz" not in code


def main(everything: bool) -> None:
    """One entry for each kind of GPU, or both for all dtypes with all statistics."""
    single = gpu.KINDS[torch.float32]
    if not everything:
        check(kernel.summarize_one, ONE, {"KIND": single, "FLAGS": 1}, 80)
        check(kernel.summarize_list, LIST, {"PRESENT": 1 << single, "FLAGS": 1}, 90)
        return
    for capability in CAPABILITIES:
        for kind in sorted(set(gpu.KINDS.values())):
            check(kernel.summarize_one, ONE, {"KIND": kind, "FLAGS": 7}, capability)
        mixed = sum(1 << gpu.KINDS[dtype] for dtype in (torch.bfloat16, torch.float32, torch.int64))
        check(kernel.summarize_list, LIST, {"PRESENT": mixed, "FLAGS": 7}, capability)


if __name__ == "__main__":
    main(sys.argv[1:] == ["everything"])
