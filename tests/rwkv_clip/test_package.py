"""The package as people meet it: its names, what importing it does, what its documentation says."""

from __future__ import annotations

import pytest

import rwkv_clip


@pytest.mark.parametrize("name", rwkv_clip.__all__)
def test_public_names_are_there(name):
    """Every public name can be had from the package itself."""
    assert getattr(rwkv_clip, name) is not None
    assert name in dir(rwkv_clip)


def test_unknown_names_are_refused():
    """A name that is not there raises the usual error."""
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rwkv_clip.nothing


def test_importing_does_nothing(run_python):
    """Importing the package loads neither torch nor tracehooks and reads no environment variable of its own."""
    code = (
        "import os, sys\n"
        "class Watched(dict):\n"
        "    def __getitem__(self, key): raise SystemExit(f'read {key}')\n"
        "    def get(self, key, default=None): raise SystemExit(f'read {key}')\n"
        "os.environ = Watched()\n"
        "import rwkv_clip\n"
        "assert 'torch' not in sys.modules and 'tracehooks' not in sys.modules\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["wkv.chunked", "config", "clip", "train"])
def test_any_module_may_come_first(run_python, module):
    """No order of imports matters: each module can be the first."""
    code = f"import rwkv_clip.{module}, sys; rwkv_clip.ModelConfig; assert 'tracehooks' not in sys.modules"
    done = run_python("-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
