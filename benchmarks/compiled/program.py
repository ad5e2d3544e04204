"""Reads a compiled program: the top-level instructions of XLA's text."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

SIZES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}
FREE = (
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"),
    *("partition-id", "replica-id", "opt-barrier"),
    *("async-done", "copy-done", "slice-done"),
)
# Prefetches into the on-chip memory of a TPU, which is written S(1).
PREFETCHES = ("copy-start", "slice-start")
COLLECTIVE = re.compile(
    "(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?"
)
ARRAY = re.compile(r"\b([a-z]+\d+[a-z\d]*|pred)\[([\d,]*)\](\{[^{}]*\})?")
NAME = re.compile(r"\s*(?:ROOT )?(%?[\w.\-]+) = (.*)")


class Array(NamedTuple):
    """An array that an instruction makes."""

    elements: int
    size: int  # bytes
    in_main_memory: bool


class Instruction(NamedTuple):
    """A top-level instruction of a program."""

    name: str
    operation: str
    arrays: list[Array]
    operands: frozenset[str]

    @property
    def is_collective(self) -> bool:
        return bool(COLLECTIVE.fullmatch(self.operation))

    @property
    def is_scalar(self) -> bool:
        """Whether it computes single numbers, outside any kernel."""
        calls = ("fusion", "custom-call", "conditional", "while")
        if self.operation in calls or COLLECTIVE.match(self.operation):
            return False
        return all(array.elements <= 1 for array in self.arrays)

    def bytes(self, in_main_memory: bool = True) -> int:
        """The bytes of its arrays in main memory, or in on-chip memory."""
        wanted = [x for x in self.arrays if x.in_main_memory == in_main_memory]
        return sum(x.size for x in wanted)


class Counts(NamedTuple):
    """What a program consists of."""

    kernels: int
    scalars: int
    gigabytes: float
    collectives: int
    float64: int
    copies: int  # of at least 64 KiB: smaller ones lay out norms anew


def counts_of(text: str) -> Counts:
    """Counts what a compiled program does, from its text."""
    written: dict[str, int] = {}
    kernels = scalars = collectives = moved = copies = 0
    for one in instructions(text):
        collectives += one.is_collective
        written[one.name] = one.bytes()
        if one.operation in PREFETCHES:
            written[one.name] = 0
            moved += one.bytes(in_main_memory=False)
        elif one.operation in FREE:
            continue
        elif one.is_scalar:
            scalars += 1
        else:
            kernels += 1
            copies += one.operation == "copy" and one.bytes() >= 2**16
            moved += one.bytes() + sum(written.get(name, 0) for name in one.operands)
    float64 = len(re.findall(r"\bf64\[", text))
    return Counts(kernels, scalars, moved / 1e9, collectives, float64, copies)


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of the entry computation."""
    entry = re.search(r"^ENTRY .*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    for line in entry.group(1).split("\n") if entry else []:
        found = NAME.match(line)
        if not found:
            continue
        name, rest = found.group(1), re.sub(r"/\*.*?\*/", "", found.group(2))
        kind, rest = _split_type(rest)
        operation = re.match(r"([\w\-]+)\(", rest)
        if operation:
            arguments = rest[operation.end() :].split("), ")[0]
            operands = frozenset(re.findall(r"%[\w.\-]+", arguments))
            yield Instruction(name, operation.group(1), _arrays(kind), operands)


def _split_type(text: str) -> tuple[str, str]:
    """The type that an instruction begins with, and the rest.

    The type of several arrays is in parentheses, and may have more inside.
    """
    end = text.index(" ")
    while text.count("(", 0, end) > text.count(")", 0, end):
        end = text.index(" ", end + 1)
    return text[:end], text[end + 1 :]


def _arrays(kind: str) -> list[Array]:
    found = []
    for dtype, dims, layout in ARRAY.findall(kind):
        elements = math.prod(int(n) for n in dims.split(",") if n)
        bits = re.search(r"\d+", dtype)
        width = SIZES.get(dtype) or max(1, int(bits.group() if bits else 32) // 8)
        found.append(Array(elements, width * elements, "S(" not in layout))
    return found
