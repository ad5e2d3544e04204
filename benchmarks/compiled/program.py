"""Reads a compiled program: the top-level instructions of XLA's text, and those of its
loops as often as they run.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

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
PARAMETER = re.compile(r"(%?[\w.\-]+) = [^\n]*? parameter\((\d+)\)")
BODY = re.compile(r"^(ENTRY )?(%?[\w.\-]+) \(.*?\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)


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
    operands: tuple[str, ...]
    text: str  # operands and attributes

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

    def called(self, role: str, bodies: dict[str, str]) -> str:
        """The computation that it calls in a role, such as the body of a loop."""
        found = re.search(rf"{role}=(%?[\w.\-]+)", self.text)
        return bodies.get(found.group(1), "") if found else ""

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


NOTHING = Counts(0, 0, 0, 0, 0, 0)


def counts_of(text: str) -> Counts:
    """Counts what a compiled program does, from its text."""
    bodies = {found.group(2): found.group(3) for found in BODY.finditer(text)}
    entry = [found.group(3) for found in BODY.finditer(text) if found.group(1)]
    counts = _counts(entry[0], bodies) if entry else NOTHING
    float64 = len(re.findall(r"\bf64\[", text))
    return counts._replace(gigabytes=counts.gigabytes / 1e9, float64=float64)


def _counts(body: str, bodies: dict[str, str]) -> Counts:
    """What one run of a computation does, in bytes, without its float64 values."""
    written: dict[str, int] = {}
    loops = [NOTHING]
    kernels = scalars = collectives = moved = copies = 0
    for one in instructions(body):
        collectives += one.is_collective
        written[one.name] = one.bytes()
        if one.operation in PREFETCHES:
            written[one.name] = 0
            moved += one.bytes(in_main_memory=False)
        elif one.operation in FREE:
            continue
        elif one.operation == "while":
            inside: Any = _counts(one.called("body", bodies), bodies)
            times = _times(one.text, one.called("condition", bodies))
            loops.append(Counts(*(times * count for count in inside)))
        elif one.is_scalar:
            scalars += 1
        else:
            kernels += 1
            copies += one.operation == "copy" and one.bytes() >= 2**16
            moved += one.bytes() + _read(one, written, bodies)
    own = Counts(kernels, scalars, moved, collectives, 0, copies)
    return Counts(*map(sum, zip(own, *loops)))


def _times(loop: str, condition: str) -> int:
    """How often a loop runs. Where XLA does not say it, as for a TPU: if the condition
    compares a counter from 0 with a number, as that of a scan. 1 for any other.
    """
    found = re.findall(r'"known_trip_count":\{"n":"(\d+)"', loop)
    if not found and "direction=LT" in condition:
        found = re.findall(r" s32\[\]\S* constant\((\d+)\)", condition)
    return int(found[0]) if len(found) == 1 else 1


def _read(one: Instruction, written: dict[str, int], bodies: dict[str, str]) -> int:
    """The bytes that an instruction reads."""
    sliced = _slices(one.called("calls", bodies))
    total = 0
    for place, name in enumerate(one.operands):
        whole = written.get(name, 0)
        total += min(whole, sliced.get(place, whole))
    return total


def _slices(body: str) -> dict[int, int]:
    """Of the parameters of a fusion that are only sliced, as in the turns of a loop,
    the bytes of the slices.
    """
    found = list(instructions(body))
    sizes = {}
    for name, place in PARAMETER.findall(body):
        same = {name}
        for one in found:
            if one.operation == "bitcast" and not same.isdisjoint(one.operands):
                same.add(one.name)
        users = [one for one in found if not same.isdisjoint(one.operands)]
        users = [one for one in users if one.name not in same]
        if users and all(one.operation == "dynamic-slice" for one in users):
            sizes[int(place)] = sum(one.bytes() for one in users)
    return sizes


def instructions(body: str) -> Iterator[Instruction]:
    """The instructions of a computation."""
    for line in body.split("\n"):
        found = NAME.match(line)
        if not found:
            continue
        name, rest = found.group(1), re.sub(r"/\*.*?\*/", "", found.group(2))
        kind, rest = _split_type(rest)
        operation = re.match(r"([\w\-]+)\(", rest)
        if operation:
            arguments = rest[operation.end() :].split("), ")[0]
            operands = tuple(dict.fromkeys(re.findall(r"%[\w.\-]+", arguments)))
            yield Instruction(name, operation.group(1), _arrays(kind), operands, rest)


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
