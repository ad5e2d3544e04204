"""Of 100 faults in two models of other libraries, 95 are named right."""

import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")

from tests.autopsy import faults

# In bfloat16 all kinds can be planted. A large fault of another kind is one of the
# dtype too in float16.
BFLOAT16 = faults.DTYPES[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flax", "equinox"])
@pytest.mark.parametrize("kind", faults.KINDS)
def test_each_kind_is_named_in_each_model(kind, name, tmp_path, as_programs_run):
    fault = faults.plant(kind, name, BFLOAT16, 0, tmp_path)
    verdict = faults.named(fault)
    assert faults.is_right(fault, verdict), f"{fault.way} {fault.examples}\n{verdict}"


@pytest.mark.slow
def test_95_of_100_faults_are_named(tmp_path, as_programs_run):
    right = 0
    for kind, name, dtype, seed in faults.cases(0):
        fault = faults.plant(kind, name, dtype, seed, tmp_path)
        right += faults.is_right(fault, faults.named(fault))
    assert right >= 95
