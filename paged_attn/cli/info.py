"""Version, build, devices, and what each op runs on here."""

import argparse
import platform

import torch

import paged_attn

OPS = ["paged_attention", "write_kv", "rope_write_kv", "copy_blocks", "swap_blocks", "gather_kv", "merge_attn_states"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def main(args: argparse.Namespace) -> int:
    rows = [
        ("paged_attn", paged_attn.__version__),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"),
        ("CUDA ops", cuda_build()),
    ]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            rows.append(
                (
                    f"cuda:{i}",
                    f"{device.name}, compute capability {device.major}.{device.minor}, "
                    f"{device.multi_processor_count} SMs, {device.total_memory / 2**30:.0f} GiB",
                )
            )
    else:
        rows.append(("device", f"no GPU visible; CPU with {torch.get_num_threads()} threads"))
    for op in OPS:
        rows.append((op, ", ".join(f"{key} {'yes' if runs(op, key) else 'no'}" for key in ("CPU", "CUDA"))))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def cuda_build() -> str:
    if not registered("paged_attention", "CUDA"):
        return "not built (no nvcc at build time, or PAGED_ATTN_CUDA=0)"
    toolkit, driver, architectures = torch.ops.paged_attn.build_info().split("|")
    return f"toolkit {toolkit}, driver for CUDA {driver}, architectures {architectures}"


def registered(op: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"paged_attn::{op}", key)


def runs(op: str, key: str) -> bool:
    return registered(op, key) and (key == "CPU" or torch.cuda.is_available())
