"""The register gate: reads ``ptxas -v`` output, fails on spills or local memory, prints what every kernel uses.

An exception stands in the source of the kernel, as a comment ``// ptxas: <kernel name> may spill: <reason>``.
"""

import re
import sys
from collections import Counter
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
EXCEPTION = re.compile(r"// ptxas: (\w+) may spill: \S")


def main(log: str) -> int:
    excepted = {name for path in Path("csrc").rglob("*.cu*") for name in EXCEPTION.findall(path.read_text())}
    kernel, kernels, bad = ("?", "?"), 0, 0
    most: Counter[str] = Counter()
    for line in Path(log).read_text(errors="replace").splitlines():
        if match := ENTRY.search(line):
            kernel, kernels = match.groups(), kernels + 1
        elif match := STACK.search(line):
            if any(int(n) for n in match.groups()) and not any(name in kernel[0] for name in excepted):
                bad += 1
                print(f"{kernel[1]} {kernel[0]}: {match.group(0)}")
        elif match := REGISTERS.search(line):
            most[kernel[1]] = max(most[kernel[1]], int(match.group(1)))
    print(f"ptxas: {kernels} kernels, {bad} with spills or local memory; most registers: {dict(most)}")
    return 1 if bad or kernels == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
