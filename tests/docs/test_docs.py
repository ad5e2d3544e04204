"""Every code block of every page in docs/ runs, prints what the page says it prints,
and raises what the page says it raises.

The blocks of a page run from top to bottom in one namespace. It begins empty, so that a
reader can paste the blocks. Only for a page in `WITHOUT_IMPORTS` it begins with `jax`,
`jnp`, `lax`, `np`, `optax`, `P` (PartitionSpec), `optaxclip` and all that it has. A
```text block right after a block of code is what it prints; where the code raises, the
last lines are the error as Python shows it. ` ...` at the end of a line stands for the
rest of it, and `...` as the last line for all that follows. Numbers with a point may be
off by one in the last digit that is shown, since they come of sums that another machine
adds up in another order; everything else is compared as it stands, but for the width of
spaces.
"""

import re
import shlex
import textwrap
from contextlib import chdir, redirect_stdout
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import optaxclip
from optaxclip.doctor.__main__ import main as doctor_main
from optaxclip.replay.__main__ import main as replay_main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?")


# Pages that say in words what their blocks import.
WITHOUT_IMPORTS = {"each_method.md", "per_example.md"}
# Packages that a page may show and that the library does not need.
OPTIONAL = ("dp_accounting", "flax")
COMMANDS = {"optaxclip.replay": replay_main, "optaxclip.doctor": doctor_main}


class Block(NamedTuple):
    kind: str  # python, sh
    line: int  # of its first line in the page
    source: str
    printed: str | None  # what stands in the text block after it


def blocks_of(page):
    text = (DOCS / page).read_text()
    fences = list(FENCE.finditer(text))
    for fence, after in zip(fences, [*fences[1:], None]):
        if fence[1] in ("text", "diff"):
            continue
        line, printed = text.count("\n", 0, fence.start()) + 2, None
        if after and after[1] == "text":
            between = text[fence.end() : after.start()]
            printed = None if between.strip() else after[2]
        yield Block(fence[1], line, fence[2], printed)


def names():
    given = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "optax": optax}
    given |= {"P": PartitionSpec, "optaxclip": optaxclip, "__name__": "docs"}
    public = {name: getattr(optaxclip, name) for name in optaxclip.__all__}
    return vars(optaxclip) | public | given


def run_block(block, page, namespace):
    if block.kind == "python":
        source = "\n" * (block.line - 1) + block.source
        exec(compile(source, f"docs/{page}", "exec"), namespace)
        return
    for command in block.source.splitlines():
        words = shlex.split(command)
        known = words[:2] == ["python", "-m"] and words[2] in COMMANDS
        assert known, f"no test knows how to run {command!r}"
        COMMANDS[words[2]](words[3:])


def run(block, page, namespace):
    """What the block prints, with the error that it raises, if it is one that the page
    tells of.
    """
    out = StringIO()
    try:
        with redirect_stdout(out):
            run_block(block, page, namespace)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    except Exception as error:
        kind, module = type(error).__name__, type(error).__module__
        kind = kind if module == "builtins" else f"{module}.{kind}"
        if f"{kind}:" not in (block.printed or ""):
            raise
        out.write(f"{kind}: {error}")
    return out.getvalue()


def agree(shown, printed):
    """Is the line as the page shows it, up to one in the last digit of its numbers?"""
    if shown.endswith(" ..."):
        shown = shown[:-4]
        printed = " ".join(printed.split()[: len(shown.split())])
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    return all(
        abs(float(one) - float(other)) <= last_digit(one)
        for one, other in zip(NUMBER.findall(shown), NUMBER.findall(printed))
    )


def last_digit(number):
    """One in the last digit of a number as it is written; 0 for a whole one, which is a
    count.
    """
    digits, _, exponent = number.partition("e")
    places = len(digits.partition(".")[2])
    if not places and not exponent:
        return 0.0
    return 1.001 * 10.0 ** (int(exponent or 0) - places)


def assert_as_shown(shown, printed, where):
    wanted, got = (
        textwrap.dedent(text).rstrip().splitlines() for text in (shown, printed)
    )
    if wanted and wanted[-1] == "...":
        wanted.pop()
        got = got[: len(wanted)]
    assert len(wanted) == len(got) and all(map(agree, wanted, got)), (
        f"{where} shows\n{shown}\nbut the code printed\n{printed}"
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_does_what_it_shows(page, tmp_path):
    if "import orbax" in (DOCS / page).read_text():
        pytest.importorskip("orbax.checkpoint")
    namespace = names() if page in WITHOUT_IMPORTS else {"__name__": "docs"}
    with chdir(tmp_path), jax.numpy_rank_promotion("allow"):  # as it is for users
        for block in blocks_of(page):
            printed = run(block, page, namespace)
            if block.printed is not None:
                assert_as_shown(
                    block.printed, printed, f"docs/{page}, line {block.line},"
                )


SAME = [
    ("a 0.707  [1. 2.]\n", "a 0.708 [1. 2.]\n"),
    ("1e-7", "2e-7"),
    ("nan inf", "nan inf"),
    ("a\n...", "a\nb\nc"),
    ("TypeError: no 3 ...", "TypeError: no 3 at all"),
]


OTHER = [("0.707", "0.709"), ("3 steps", "4 steps"), ("a", "b"), ("a", "a\nb")]


OTHER += [("a\nb", "a"), ("-1.0", "1.0"), ("nan", "1.0"), ("f32 1.0", "f16 1.0")]


def test_the_comparison_sees_another_digit_word_or_line():
    for pair in SAME:
        assert_as_shown(*pair, "here")
    for pair in OTHER:
        with pytest.raises(AssertionError):
            assert_as_shown(*pair, "here")


def test_every_test_that_the_numerics_page_names_exists():
    page = (DOCS / "numerics.md").read_text()
    known = set()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        defined = re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        known |= {path.stem, *defined}
    mentioned = set(re.findall(r"\btest_\w+", page))
    assert mentioned and mentioned <= known, mentioned - known


def anchors_of(page):
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text.lower(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../CHANGELOG.md"])
def test_links_to_a_section_lead_to_one(page):
    path = DOCS / page
    links = re.findall(r"\]\(([\w./-]*)#([^)]*)\)", FENCE.sub("", path.read_text()))
    for target, anchor in links:
        there = path.parent / target if target else path
        assert anchor in anchors_of(there), f"{page} links to {target}#{anchor}"


METHODS = (DOCS / "methods.md").read_text()


def test_every_public_name_of_the_tables_exists():
    # The tables of clippers and of shrinks. The table of choices names arguments.
    tables = METHODS[: METHODS.index("### Four choices")]
    clippers, shrinks = tables.split("| shrink | new norm")
    names = re.findall(r"^\| `([\w.]+)", clippers, re.MULTILINE)
    names += [f"shrinks.{name}" for name in re.findall(r"^\| `(\w+)", shrinks, re.M)]
    assert {"clip_by_global_norm", "shrinks.hard"} <= set(names)
    for name in names:
        assert attrgetter(name)(optaxclip), name
