"""Import (group H): fresh interpreters, load order, versions, two copies."""

import inspect
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paged_attn

PACKAGE = Path(paged_attn.__file__).parent


def python(code, *paths, **environment):
    """Run ``code`` in a fresh interpreter that finds the package in ``paths``."""
    search = os.pathsep.join(map(str, paths or [PACKAGE.parent]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": search} | environment,
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
    )


@pytest.mark.parametrize("first", ["paged_attn", "paged_attn._host", "paged_attn.ops", "paged_attn.reference"])
def test_imported_before_torch(first):
    result = python(f"import {first}; import torch; print(torch.ops.paged_attn.write_kv.default)")
    assert result.returncode == 0, result.stderr
    assert "paged_attn.write_kv.default" in result.stdout


def test_import_needs_torch_and_numpy_alone():
    extras = "transformers accelerate gguf rich tqdm matplotlib tabulate pytest hypothesis click psutil triton"
    result = python(f"import sys, torch; before = set(sys.modules); import paged_attn; "
                    f"print([m for m in {extras.split()} if m in sys.modules and m not in before])")  # fmt: skip
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_an_older_torch_is_named():
    """Both versions are in the message."""
    result = python("import torch; torch.__version__ = '2.10.1+cpu'; import paged_attn")
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError")
    assert "2.10.1" in message
    assert "2.11" in message


def test_an_older_transformers_is_named(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(ImportError, match=r"needs transformers 5\.17 or newer, found 4\.57\.1"):
        runpy.run_path(str(PACKAGE / "integrations" / "_options.py"))


def copied(folder, *, without=()):
    """A second copy of the package."""
    ignored = shutil.ignore_patterns("__pycache__", *without)
    shutil.copytree(PACKAGE, folder / "paged_attn", ignore=ignored)
    return folder


@pytest.mark.parametrize(("library", "name"), [("_C*", "_C.abi3.so"), ("_host*", "paged_attn._host")])
def test_a_missing_library_is_named(tmp_path, library, name):
    result = python("import paged_attn", copied(tmp_path, without=[library]))
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError")
    assert name in message
    assert "build_ext --inplace" in message


def test_two_copies_register_once(tmp_path):
    """A source tree and an installed copy in one process."""
    code = f"""
import sys, paged_attn
for name in [name for name in sys.modules if name.startswith("paged_attn")]:
    del sys.modules[name]
sys.path.insert(0, {str(copied(tmp_path))!r})
import paged_attn as second, torch
assert second.__file__.startswith({str(tmp_path)!r})
lse = torch.zeros(1, 1)
print(float(second.merge_attn_states(torch.zeros(1, 1, 8), lse, torch.ones(1, 1, 8), lse)[0][0, 0, 0]))
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "0.5"


def test_version_is_in_one_place():
    assert paged_attn.__version__ == paged_attn._version.__version__
    assert paged_attn.__version__[0].isdigit()


@pytest.mark.parametrize("name", ["PagedKVCache", "Admission", "OutOfBlocks", "CacheCorrupted", "reference"])
def test_public_names(name):
    assert name in paged_attn.__all__
    assert hasattr(paged_attn, name)


def test_operations_have_twins_of_the_same_signature():
    """Each op and its reference take the same arguments, in the same order, with the same defaults."""
    operations = [name for name in paged_attn.ops.__dict__ if name in paged_attn.__all__]
    assert {"paged_attention", "write_kv", "copy_blocks", "swap_blocks", "gather_kv", "merge_attn_states"} <= set(
        operations
    )
    for name in operations:
        op, twin = (inspect.signature(getattr(module, name)) for module in (paged_attn, paged_attn.reference))
        defaults = [(p.name, p.kind, p.default) for p in op.parameters.values()]
        assert defaults == [(p.name, p.kind, p.default) for p in twin.parameters.values()], name
