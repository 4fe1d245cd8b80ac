"""The stable-ABI gate: ``_C.abi3.so`` needs libtorch's C shims, the CUDA driver, libc and libstdc++, nothing else."""

import re
import subprocess
import sys

FORBIDDEN = re.compile(r"^(_ZN?K?2at|_ZN?K?3c10|_ZN?K?5torch|Py|_Py)")
OURS = re.compile(r"^(_ZN?K?10paged_attn)")


def main(library: str) -> int:
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1].split("@")[0] for line in listing.splitlines()]
    bad = [s for s in symbols if FORBIDDEN.match(s) or OURS.match(s)]
    for symbol in bad:
        print(f"{library}: {symbol} is not part of the stable ABI")
    print(f"{library}: {len(symbols)} undefined symbols, {len(bad)} of them forbidden")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
