"""The one part of the build that pyproject.toml cannot say: the optional native kernel of tracehooks.stats."""

from __future__ import annotations

from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class PlainLibrary(build_ext):
    """Builds a library with a plain C interface, which need not have a function that initialises a module."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None beyond those that the source marks."""
        return list(ext.export_symbols)


KERNEL = Extension(
    "tracehooks.stats._cpu",
    sources=["tracehooks/stats/cpu.cpp", "tracehooks/stats/door.cpp"],
    depends=sorted(glob("tracehooks/stats/native/*.h")),
    # Instruction sets are chosen at run time. Contraction would make their roundings differ.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-g0", "-w"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[KERNEL], cmdclass={"build_ext": PlainLibrary})
