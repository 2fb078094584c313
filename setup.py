"""The one part of the build that pyproject.toml cannot say: its optional native parts."""

from __future__ import annotations

from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class PlainLibrary(build_ext):
    """Builds a library with a plain C interface, which need not have a function that initialises a module."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None beyond those that the source marks."""
        return list(ext.export_symbols)


# Instruction sets are chosen at run time. Contraction would make their roundings differ.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-g0", "-w"]


def native(name: str, *sources: str) -> Extension:
    """A native part of the package, which works without it."""
    headers = sorted(glob("tracehooks/*/native/*.h"))
    return Extension(
        name, list(sources), depends=headers, extra_compile_args=FLAGS, extra_link_args=["-pthread"], optional=True
    )


KERNEL = native("tracehooks.stats._cpu", "tracehooks/stats/cpu.cpp", "tracehooks/stats/door.cpp")
LANE = native("tracehooks.capture._lane", "tracehooks/capture/lane.cpp")

setup(ext_modules=[KERNEL, LANE], cmdclass={"build_ext": PlainLibrary})
