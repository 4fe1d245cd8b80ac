"""Builds the two native modules: ``_C`` (tensor ops, LibTorch stable ABI) and ``_host`` (block manager, pybind11).

Environment:
    CUDA_HOME             the CUDA toolkit; default: the one that ``nvcc`` on PATH belongs to
    PAGED_ATTN_CUDA       0: CPU ops only; 1: CUDA is required; default: CUDA where nvcc is found
    TORCH_CUDA_ARCH_LIST  default ``8.0+PTX;9.0a``
    MAX_JOBS              parallel compilations
    PAGED_ATTN_VERBOSE    1: registers, stack and spills of every kernel in the build log
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent.resolve()
TORCH_TARGET_VERSION = "0x020b000000000000"  # torch 2.11
# torch defines these for nvcc, which takes conversions away from the 16-bit types.
TORCH_NVCC_MACROS = ["__CUDA_NO_HALF_OPERATORS__", "__CUDA_NO_HALF_CONVERSIONS__", "__CUDA_NO_BFLOAT16_CONVERSIONS__"]
TORCH_NVCC_MACROS += ["__CUDA_NO_HALF2_OPERATORS__"]
# Archives that are linked in (the CUDA runtime, libstdc++ of some compilers) must not shadow the process's own.
HIDE_ARCHIVES = ["-Wl,--exclude-libs,ALL"]
DEFAULT_ARCH_LIST = "8.0+PTX;9.0a"


def stop(message: str) -> None:
    sys.exit(f"paged_attn: {message}")


try:
    import torch
    import torch.utils.cpp_extension as cpp_extension
except ImportError:
    stop("building needs torch >= 2.11; install it first (pip install torch), or build without --no-build-isolation")
try:
    import pybind11
except ImportError:
    stop("building needs pybind11 (pip install pybind11)")


def toolkit_root(nvcc: str) -> Path | None:
    """The real root of the toolkit; ``nvcc`` itself may be a wrapper script elsewhere."""
    answer = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    top = re.search(r"TOP=(\S+)", answer.stdout + answer.stderr)
    return Path(top.group(1)).resolve() if top else None


def find_cuda() -> Path | None:
    wanted = os.environ.get("PAGED_ATTN_CUDA", "")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        if not (Path(home) / "bin" / "nvcc").exists():
            stop(f"CUDA_HOME={home} holds no bin/nvcc; correct it, or set PAGED_ATTN_CUDA=0 to build the CPU ops alone")
        root = Path(home)
    else:
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        root = toolkit_root(nvcc) if nvcc else None
    if root is None and wanted == "1":
        stop("PAGED_ATTN_CUDA=1, but no nvcc was found; put it on PATH or set CUDA_HOME")
    return root


def nvcc_offers(root: Path, option: str) -> bool:
    return option in subprocess.run([str(root / "bin" / "nvcc"), "--help"], capture_output=True, text=True).stdout


def sources(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def ops_extension(cuda: Path | None) -> Extension:
    define = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    include = cpp_extension.include_paths()
    link = [*HIDE_ARCHIVES, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    library_dirs = cpp_extension.library_paths()
    cxx = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", *define]
    nvcc: list[str] = []
    files = sources("csrc/registration.cpp", "csrc/cpu/*.cpp")
    if cuda:
        cpp_extension.CUDA_HOME = str(cuda)
        archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST)
        files += sources("csrc/cuda/**/*.cpp", "csrc/cuda/**/*.cu")
        if "9.0a" in archs:
            define.append("-DPAGED_ATTN_SM90")
        else:
            files = [f for f in files if "/sm90/" not in f]
        include = [*include, str(cuda / "include")]
        library_dirs = [*library_dirs, str(cuda / "lib64"), str(cuda / "targets" / "x86_64-linux" / "lib")]
        link += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        cxx += ["-DUSE_CUDA", f'-DPAGED_ATTN_ARCHS="{archs}"', *define[1:]]
        nvcc = [
            *(f"-U{macro}" for macro in TORCH_NVCC_MACROS),
            "-O3",
            "-std=c++17",
            "--expt-relaxed-constexpr",
            "-Xcompiler=-fvisibility=hidden",
            "-DUSE_CUDA",
            *define,
        ]
        if nvcc_offers(cuda, "--compress-mode"):
            nvcc.append("--compress-mode=size")  # a quarter of the bytes
        if os.environ.get("PAGED_ATTN_VERBOSE") == "1":
            nvcc.append("-Xptxas=-v")
        print(f"paged_attn: CPU and CUDA ops, {cuda}, architectures {archs}", file=sys.stderr)
    else:
        print("paged_attn: no CUDA toolkit in use, building the CPU ops alone", file=sys.stderr)
    return Extension(
        "paged_attn._C",
        files,
        include_dirs=include,
        library_dirs=library_dirs,
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=link,
        py_limited_api=True,
        language="c++",
    )


def host_extension() -> Extension:
    return Extension(
        "paged_attn._host",
        sources("csrc/host/*.cpp"),
        include_dirs=[pybind11.get_include()],
        extra_compile_args={"cxx": ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-Wall"]},
        extra_link_args=HIDE_ARCHIVES,
        language="c++",
    )


class BuildExtension(cpp_extension.BuildExtension):
    """torch's, but with one line where no C++ compiler is found."""

    def build_extensions(self) -> None:
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler.split()[0]) is None:
            stop(f"building needs a C++17 compiler; {compiler} was not found (install g++ or set CXX)")
        if shutil.which("ninja") is None and not cpp_extension.is_ninja_available():
            print("paged_attn: ninja was not found, building one file at a time (pip install ninja)", file=sys.stderr)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        # Ninja keeps header dependencies a folder: each extension gets its own, or it would forget those of the other.
        shared = self.build_temp
        self.build_temp = os.path.join(shared, ext.name.rpartition(".")[2])
        if torch.version.cuda is None:  # then torch tells ninja nothing of the headers that nvcc reads
            changed = max(header.stat().st_mtime for header in ROOT.glob("csrc/**/*.*h"))
            for built in Path(self.build_temp).rglob("*.o"):
                if built.stat().st_mtime < changed:
                    built.unlink()
        super().build_extension(ext)
        self.build_temp = shared


setup(
    ext_modules=[ops_extension(find_cuda()), host_extension()],
    cmdclass={"build_ext": BuildExtension},
)
