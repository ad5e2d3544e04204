"""Makes deliberate faults in the library, one after the other, and looks whether a test turns red.

    python -m mutations                        all files
    python -m mutations optaxclip/core.py      one file
    python -m mutations --list                 only shows the faults

First the guards of every file are run on the library as it is and must be green. Then each fault is made in a copy of the repository. One that leaves all guards green has survived:
either a test is missing, or the fault changes nothing and its sheet says why. The exit status is 0 if no survivor is without an explanation.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from .catalogue import Fault, Sheet, read_sheets
from .trial import ROOT, Outcome, prepare, run_all


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mutations", description="Every deliberate fault must turn a test red.")
    parser.add_argument("files", nargs="*", help="files of the library, as in optaxclip/core.py; all by default")
    parser.add_argument("--list", action="store_true", help="show the faults and make none")
    parser.add_argument("--workers", type=int, default=1, help="how many trials at once (default: 1)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one trial; a fault that takes longer counts as killed (default: 300)")
    options = parser.parse_args(arguments)
    try:
        sheets = read_sheets(options.files)
        for fault in (fault for sheet in sheets for fault in sheet.faults):
            fault.within((ROOT / fault.file).read_text())
    except ValueError as error:
        return _fail(str(error))
    if options.list:
        print("\n".join(_shown(fault) for sheet in sheets for fault in sheet.faults))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _run(sheets, prepare(Path(folder), options.workers), options.limit)


def _run(sheets: list[Sheet], homes: list[Path], limit: float) -> int:
    for outcome in run_all([(sheet, None) for sheet in sheets], homes, limit):
        if outcome.code != 0:
            return _fail(f"mutations: the guards of {outcome.sheet.file} must be green before any fault is made:\n{outcome.text}")
        print(f"green     {outcome.seconds:4.0f} s  {outcome.sheet.file}", flush=True)
    outcomes = []
    for outcome in run_all([(sheet, fault) for sheet in sheets for fault in sheet.faults], homes, limit):
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
    print(f"\n{_table(sheets, outcomes)}")
    return int(any(_verdict(outcome) in ("SURVIVED", "ERROR") for outcome in outcomes))


def _verdict(outcome: Outcome) -> str:
    if outcome.code == 0:
        return "explained" if outcome.fault and outcome.fault.explained else "SURVIVED"
    # What can not be imported is no fault that a test must see, and an explanation that is wrong had better go.
    stray = (outcome.code is not None and outcome.code > 1) or (outcome.fault is not None and outcome.fault.explained)
    return "ERROR" if stray else "killed"


def _line(outcome: Outcome) -> str:
    verdict = _verdict(outcome)
    assert outcome.fault is not None
    told = {"killed": f"  by {outcome.text}" if outcome.code == 1 else f"  (exit status {outcome.code})", "ERROR": f"\n{outcome.text}"}.get(verdict, "")
    return f"{verdict:9} {outcome.seconds:4.0f} s  {_shown(outcome.fault)}{told}"


def _shown(fault: Fault) -> str:
    why = f"\n                 = {fault.explained}" if fault.explained else ""
    return f"{fault.file}\n                 - {fault.right.strip()}\n                 + {fault.wrong.strip()}{why}"


def _table(sheets: list[Sheet], outcomes: list[Outcome]) -> str:
    lines = [f"{'file':40} {'faults':>7} {'killed':>7} {'explained':>10} {'survivors':>10}"]
    rows = [(sheet.file, [_verdict(outcome) for outcome in outcomes if outcome.sheet is sheet]) for sheet in sheets]
    rows.append(("all", [verdict for _, verdicts in rows for verdict in verdicts]))
    for name, verdicts in rows:
        counts = [verdicts.count("killed"), verdicts.count("explained"), verdicts.count("SURVIVED") + verdicts.count("ERROR")]
        lines.append(f"{name:40} {len(verdicts):7} {counts[0]:7} {counts[1]:10} {counts[2]:10}")
    return "\n".join(lines)


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
