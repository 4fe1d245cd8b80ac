"""Build (group H): each surrounding works, or stops with one line that names what is missing.

A stand-in compiler writes empty files, so that a build takes seconds; what the sources compile to is tested elsewhere.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")

COMPILER = """#!/bin/sh
echo "$@" >> "$0.log"
for argument in "$@"; do
  case "$previous" in -o | -MF) : > "$argument" ;; esac
  case "$previous" in -o) made=1 ;; esac
  previous="$argument"
done
[ -n "$made" ] || {answer}
"""
NVCC_ANSWER = 'echo "Cuda compilation tools, release 13.0, V13.0.88"; echo "#$ TOP={top}"'


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def surroundings(tmp_path):
    """Environment variables with a stand-in C++ compiler, and no CUDA."""
    real = shutil.which("c++") or shutil.which("g++")
    if real is None:
        pytest.skip("needs a C++ compiler")
    write_script(tmp_path / "bin" / "stand-in-g++", COMPILER.replace("{answer}", f'exec {real} "$@"'))
    dropped = ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "PAGED_ATTN_VERBOSE", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    compiler = str(tmp_path / "bin" / "stand-in-g++")
    return kept | {"CXX": compiler, "CC": compiler, "PAGED_ATTN_CUDA": "0", "TORCH_DONT_CHECK_COMPILER_ABI": "1"}


@pytest.fixture
def toolkit(tmp_path):
    """A folder that looks like a CUDA toolkit."""
    root = tmp_path / "cuda"
    write_script(root / "bin" / "nvcc", COMPILER.replace("{answer}", NVCC_ANSWER.replace("{top}", str(root))))
    for folder in ("include", "lib64"):
        (root / folder).mkdir()
    return root


def build(tmp_path, environment, *arguments):
    """``setup.py build_ext`` into a temporary folder."""
    arguments = arguments or ("build_ext", "--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib")
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def hide_modules(tmp_path, environment, *names):
    """Make ``import name`` fail, as in a build environment that lacks it."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(f"raise ImportError('No module named {name}')\n")
    return environment | {"PYTHONPATH": str(folder)}


def last_line(result):
    return (result.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize("name", ["torch", "pybind11"])
def test_a_missing_module_is_named(tmp_path, surroundings, name):
    result = build(tmp_path, hide_modules(tmp_path, surroundings, name), "--version")
    assert result.returncode != 0
    assert name in last_line(result)
    assert "Traceback" not in result.stderr


def test_a_wrong_cuda_home_is_named(tmp_path, surroundings):
    environment = surroundings | {"CUDA_HOME": str(tmp_path / "nowhere"), "PAGED_ATTN_CUDA": "1"}
    result = build(tmp_path, environment, "--version")
    assert result.returncode != 0
    assert f"CUDA_HOME={tmp_path / 'nowhere'}" in last_line(result)
    assert "Traceback" not in result.stderr


def test_a_missing_compiler_is_named(tmp_path, surroundings):
    result = build(tmp_path, surroundings | {"CXX": "no-such-compiler", "CC": "no-such-compiler"})
    assert result.returncode != 0
    assert "no-such-compiler" in last_line(result)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("jobs", ["1", None])
def test_cpu_build(tmp_path, surroundings, jobs):
    """Without CUDA: both modules are built, and one line says that there are only CPU ops."""
    result = build(tmp_path, surroundings | ({"MAX_JOBS": jobs} if jobs else {}))
    assert result.returncode == 0, result.stderr[-2000:]
    assert "CPU ops alone" in result.stderr
    assert sorted(path.name.split(".")[0] for path in (tmp_path / "lib" / "paged_attn").iterdir()) == ["_C", "_host"]


def test_build_without_ninja(tmp_path, surroundings):
    commands = tmp_path / "commands"
    commands.mkdir()
    for command in Path("/usr/bin").iterdir():
        if not command.name.startswith("ninja"):
            (commands / command.name).symlink_to(command)
    result = build(tmp_path, surroundings | {"PATH": str(commands)})
    assert result.returncode == 0, result.stderr[-2000:]
    assert "ninja was not found" in result.stderr
    assert (tmp_path / "lib" / "paged_attn" / "_C.abi3.so").exists()


def test_cuda_build_without_a_gpu_and_an_architecture_list(tmp_path, surroundings, toolkit):
    """The default list: 8.0 with PTX, and 9.0a."""
    environment = surroundings | {"CUDA_HOME": str(toolkit), "PAGED_ATTN_CUDA": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = build(tmp_path, environment)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "8.0+PTX;9.0a" in result.stderr
    flags = (toolkit / "bin" / "nvcc.log").read_text()
    for target in ("compute_80,code=sm_80", "compute_80,code=compute_80", "compute_90a,code=sm_90a"):
        assert target in flags


def test_an_architecture_list_is_honoured(tmp_path, surroundings, toolkit):
    environment = surroundings | {"CUDA_HOME": str(toolkit), "PAGED_ATTN_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "8.6"}
    result = build(tmp_path, environment)
    assert result.returncode == 0, result.stderr[-2000:]
    flags = (toolkit / "bin" / "nvcc.log").read_text()
    assert "compute_86,code=sm_86" in flags
    assert "compute_90a" not in flags


def test_a_source_distribution_holds_every_source(tmp_path, surroundings):
    """Headers and CUDA files too, whatever this build leaves out; nothing that was compiled."""
    command = ("egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path / "dist")
    result = build(tmp_path, surroundings, *command)
    assert result.returncode == 0, result.stderr[-2000:]
    with tarfile.open(next((tmp_path / "dist").iterdir())) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert sources <= names
    assert "paged_attn/py.typed" in names
    assert not any(name.endswith(".so") for name in names)
