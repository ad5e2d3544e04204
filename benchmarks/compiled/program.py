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
        match = re.search(rf"{role}=(%?[\w.\-]+)", self.text)
        return bodies.get(match.group(1), "") if match else ""

    def bytes(self, in_main_memory: bool = True) -> int:
        """The bytes of its arrays in main memory, or in on-chip memory."""
        total = 0
        for array in self.arrays:
            if array.in_main_memory == in_main_memory:
                total += array.size
        return total


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
    bodies = {}
    entry = ""
    for is_entry, name, body in BODY.findall(text):
        bodies[name] = body
        if is_entry:
            entry = body
    counts = _counts(entry, bodies)
    float64 = len(re.findall(r"\bf64\[", text))
    return counts._replace(gigabytes=counts.gigabytes / 1e9, float64=float64)


def _counts(body: str, bodies: dict[str, str]) -> Counts:
    """What one run of a computation does, in bytes, without its float64 values."""
    written: dict[str, int] = {}
    loops = [NOTHING]
    kernels = scalars = collectives = moved = copies = 0
    for instruction in instructions(body):
        operation = instruction.operation
        size = instruction.bytes()
        collectives += instruction.is_collective
        written[instruction.name] = size
        if operation in PREFETCHES:
            written[instruction.name] = 0
            moved += instruction.bytes(in_main_memory=False)
        elif operation in FREE:
            continue
        elif operation == "while":
            turn: Any = _counts(instruction.called("body", bodies), bodies)
            times = _times(instruction.text, instruction.called("condition", bodies))
            loops.append(Counts(*(times * count for count in turn)))
        elif instruction.is_scalar:
            scalars += 1
        else:
            kernels += 1
            copies += operation == "copy" and size >= 2**16
            moved += size + _read(instruction, written, bodies)
    outside_loops = Counts(kernels, scalars, moved, collectives, 0, copies)
    return Counts(*map(sum, zip(outside_loops, *loops)))


def _times(loop: str, condition: str) -> int:
    """How often a loop runs. Where XLA does not say it, as for a TPU: if the condition
    compares a counter from 0 with a number, as that of a scan. 1 for any other.
    """
    counts = re.findall(r'"known_trip_count":\{"n":"(\d+)"', loop)
    if not counts and "direction=LT" in condition:
        counts = re.findall(r" s32\[\]\S* constant\((\d+)\)", condition)
    return int(counts[0]) if len(counts) == 1 else 1


def _read(
    instruction: Instruction, written: dict[str, int], bodies: dict[str, str]
) -> int:
    """The bytes that an instruction reads."""
    slices = _slices(instruction.called("calls", bodies))
    total = 0
    for place, name in enumerate(instruction.operands):
        size = written.get(name, 0)
        total += min(size, slices.get(place, size))
    return total


def _slices(body: str) -> dict[int, int]:
    """The bytes of the slices of each parameter of a fusion that is only sliced, as in
    the turns of a loop.
    """
    sizes = {}
    for name, place in PARAMETER.findall(body):
        aliases = {name}
        users = []
        for instruction in instructions(body):
            if aliases.isdisjoint(instruction.operands):
                continue
            if instruction.operation == "bitcast":
                aliases.add(instruction.name)
            else:
                users.append(instruction)
        if users and all(user.operation == "dynamic-slice" for user in users):
            sizes[int(place)] = sum(user.bytes() for user in users)
    return sizes


def instructions(body: str) -> Iterator[Instruction]:
    """The instructions of a computation."""
    for line in body.split("\n"):
        assignment = NAME.match(line)
        if not assignment:
            continue
        name, text = assignment.groups()
        text = re.sub(r"/\*.*?\*/", "", text)
        types, text = _split_type(text)
        operation = re.match(r"([\w\-]+)\(", text)
        if operation:
            arguments = text[operation.end() :].split("), ")[0]
            operands = tuple(dict.fromkeys(re.findall(r"%[\w.\-]+", arguments)))
            yield Instruction(name, operation.group(1), _arrays(types), operands, text)


def _split_type(text: str) -> tuple[str, str]:
    """The type that an instruction begins with, and the rest.

    The type of several arrays is in parentheses, and may have more inside.
    """
    end = text.index(" ")
    while text.count("(", 0, end) > text.count(")", 0, end):
        end = text.index(" ", end + 1)
    return text[:end], text[end + 1 :]


def _arrays(types: str) -> list[Array]:
    arrays = []
    for dtype, dims, layout in ARRAY.findall(types):
        elements = math.prod(int(n) for n in dims.split(",") if n)
        bits = re.search(r"\d+", dtype)
        width = SIZES.get(dtype) or max(1, int(bits.group() if bits else 32) // 8)
        arrays.append(Array(elements, width * elements, "S(" not in layout))
    return arrays
