"""Specification of the installed package: its native parts are built from what the source distribution carries, and it works
without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
NATIVE = {f"tracehooks/stats/_cpu{SUFFIX}", f"tracehooks/capture/_lane{SUFFIX}"}

TRAINS = """
import sys, warnings
import torch, tracehooks
from tracehooks import stats
from tracehooks.capture import lane
assert tracehooks.__file__.startswith(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with tracehooks.attach(model, sys.argv[2], quiet=True):
        for _ in range(5):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
rows = len(tracehooks.open(sys.argv[2]).tensors())
print(stats.kernel_name("cpu").split()[0], lane.native() is not None, len(said), rows)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("tracehooks", "rwkv_clip"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder / "dist")], cwd=folder, check=True, capture_output=True)
    [made] = (folder / "dist").iterdir()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_the_package_that_is_built_from_sources(source: Path, tmp_path: Path, compiler: bool) -> None:
    """With a compiler both native parts are in the wheel and used; without, it is built all the same, trains and records the
    same rows, and says once that it is slower."""
    if compiler and shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    settings = {} if compiler else {"CC": "false", "CXX": "false"}
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, env=os.environ | settings)
    [wheel] = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        assert NATIVE & set(archive.namelist()) == (NATIVE if compiler else set())
    done = subprocess.run(
        [sys.executable, "-c", TRAINS, str(installed), str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(installed)}, cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    kernel, quick, said, rows = done.stdout.split()
    assert (kernel, quick, said) == (("native", "True", "0") if compiler else ("reference", "False", "1"))
    assert int(rows) == 5 * 13  # input; outputs and their gradients; parameters, gradients and updates
