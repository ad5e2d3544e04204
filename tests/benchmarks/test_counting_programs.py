"""Reading compiled programs, from text as XLA writes it."""

from benchmarks.compiled import program

LOOP = """
%body (p.1: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %p.1 = (s32[], f32[1000]{0}) parameter(0)
  %n = s32[] get-tuple-element(%p.1), index=0
  %x = f32[1000]{0} get-tuple-element(%p.1), index=1
  %y = f32[1000]{0} fusion(%x), kind=kLoop, calls=%double
  ROOT %t = (s32[], f32[1000]{0}) tuple(%n, %y)
}

ENTRY %main (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[1000]{0}) tuple(%zero, %a)
  %while = (s32[], f32[1000]{0}) while(%start), condition=%cond, body=%body, """
TIMES = 'backend_config={"known_trip_count":{"n":"5"}}'
END = """
  ROOT %out = f32[1000]{0} get-tuple-element(%while), index=1
}
"""


def test_a_loop_counts_as_often_as_it_runs():
    counts = program.counts_of(LOOP + TIMES + END)
    assert counts.kernels == 5
    assert counts.gigabytes == 5 * 2 * 4000 / 1e9


def test_a_loop_of_unknown_length_counts_once():
    counts = program.counts_of(LOOP + "backend_config={}" + END)
    assert counts.kernels == 1
    assert counts.gigabytes == 2 * 4000 / 1e9


CONDITION = """
%cond (p.2: (s32[], f32[1000])) -> pred[] {
  %end = s32[]{:T(128)} constant(7)
  %p.2 = (s32[], f32[1000]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT
}
"""


def test_the_length_of_a_scan_is_read_from_its_condition():
    counts = program.counts_of(CONDITION + LOOP + "backend_config={}" + END)
    assert counts.kernels == 7
    other = CONDITION.replace("direction=LT", "direction=NE")
    assert program.counts_of(other + LOOP + "backend_config={}" + END).kernels == 1


SLICE = """
%part (q.0: f32[4,1000], q.1: s32[]) -> f32[1,1000] {
  %q.1 = s32[] parameter(1)
  %q.0 = f32[4,1000]{1,0} parameter(0)
  %flat = f32[4,1000]{1,0} bitcast(%q.0)
  ROOT %cut = f32[1,1000]{1,0} dynamic-slice(%flat, %q.1, %q.1), sizes={1,1000}
}

ENTRY %main (a: f32[4,1000], n: s32[]) -> f32[1,1000] {
  %a = f32[4,1000]{1,0} custom-call(), custom_call_target="whatever"
  %n = s32[] parameter(1)
  ROOT %out = f32[1,1000]{1,0} fusion(%a, %n), kind=kLoop, calls=%part
}
"""


def test_of_what_is_sliced_only_the_slice_is_read():
    index = 4
    moved = 1e9 * program.counts_of(SLICE).gigabytes
    assert round(moved) == 16000 + (index + 4000) + 4000


def test_what_is_sliced_and_used_is_read_as_a_whole():
    index = 4
    used = SLICE.replace("bitcast(%q.0)", "negate(%q.0)")
    moved = 1e9 * program.counts_of(used).gigabytes
    assert round(moved) == 16000 + (index + 16000) + 4000
