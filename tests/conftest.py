"""Fixtures: every test runs on each device there is, attention on CUDA once a backend."""

import os
from types import ModuleType
from typing import Any

import pytest
import torch

import paged_attn

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if CUDA else ["cpu"]
BACKENDS = ("auto", "mma", "sm90") if CUDA else ()
TARGETS = [("cpu", "auto")] + [("cuda", backend) for backend in BACKENDS]

# Each worker of pytest-xdist gets its share of the cores: more threads than cores would wait for one another.
torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


class Ops:
    """The operations under test and the device that their tensors live on."""

    def __init__(self, module: ModuleType, device: str, backend: str = "auto"):
        self._module, self.device, self._backend = module, device, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def paged_attention(self, *args: Any, **options: Any) -> Any:
        """A forced backend that cannot serve a call says so, and the test is skipped."""
        if self._backend == "auto":
            return self._module.paged_attention(*args, **options)
        try:
            return self._module.paged_attention(*args, backend=self._backend, **options)
        except ValueError as error:
            if "backend" in str(error):
                pytest.skip(str(error))
            raise


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        names = [device if device == "cpu" else f"{device}-{backend}" for device, backend in TARGETS]
        metafunc.parametrize(("device", "backend"), TARGETS, ids=names)
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


@pytest.fixture
def ops(device: str) -> Ops:
    """All operations on one device."""
    return Ops(paged_attn, device)


@pytest.fixture
def attention_ops(device: str, backend: str) -> Ops:
    """As ``ops``, with attention by one backend."""
    return Ops(paged_attn, device, backend)


@pytest.fixture
def cuda() -> str:
    """For tests of what only a GPU has."""
    if not CUDA:
        pytest.skip("needs a CUDA device")
    return "cuda"
