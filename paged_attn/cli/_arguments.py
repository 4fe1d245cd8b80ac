"""Types of command-line arguments: what they refuse, argparse reports under the option's name; what the engine refuses,
in one line too."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def checked(convert: Callable[[str], T], holds: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """A type of argument: ``convert(text)``, refused where that fails or ``holds`` is false."""

    def parse(text: str) -> T:
        try:
            value = convert(text)
            if holds(value):
                return value
        except (ValueError, RuntimeError):  # the latter from torch.device
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


@contextmanager
def refusal_ends_command(of: str = "") -> Iterator[None]:
    """A ``ValueError`` inside becomes the command's last words, after ``of``, without a traceback."""
    try:
        yield
    except ValueError as error:
        sys.exit(f"{of}{error}")


def _is_usable(name: str) -> bool:
    place = torch.device(name)
    return place.type == "cpu" or (place.type == "cuda" and (place.index or 0) < torch.cuda.device_count())


positive = checked(int, lambda n: n >= 1, "an integer of at least 1")
non_negative = checked(int, lambda n: n >= 0, "an integer of at least 0")
positive_number = checked(float, lambda x: 0 < x < math.inf, "a finite number above 0")
non_negative_number = checked(float, lambda x: 0 <= x < math.inf, "a finite number of at least 0")
share = checked(float, lambda x: 0 < x <= 1, "a number above 0, at most 1")
folder = checked(str, os.path.isdir, "a folder that is there")
device = checked(str, _is_usable, "cpu or a CUDA device that is there")
