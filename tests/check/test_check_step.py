"""`check_step` names the bug of each wrong step, and finds nothing in right ones.

Numbers are NumPy's: what is wrong with a step is known before it is run.
"""

import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optaxclip

from . import right_steps, wrong_steps

# Step, setting in which its bug shows, kind, what is wrong.
WRONG = [
    ("local_norm", "replicated", "local_norm", {"norm", "update"}),
    ("local_norm", "experts", "local_norm", {"update"}),
    # The norm of a device's share of experts, of its own batch.
    ("local_norm", "experts", "unknown", {"norm"}),
    ("clip_before_average", "replicated", "local_norm", {"norm", "update"}),
    ("gradients_summed", "replicated", "gradients_summed", {"norm", "update"}),
    ("gradients_summed", "experts", "gradients_summed", {"norm", "update"}),
    ("every_square_summed", "replicated", "copies_counted", {"norm", "update"}),
    ("every_square_summed", "fsdp", "copies_counted", {"norm", "update"}),
    ("every_square_summed", "experts", "copies_counted", {"norm", "update"}),
    ("experts_repeated", "experts", "copies_counted", {"norm", "update"}),
    ("own_shard", "fsdp", "own_shard", {"norm"}),
    ("own_shard", "fsdp", "own_factor", {"update"}),
    ("own_shard", "experts", "own_shard", {"norm"}),
    ("own_shard", "experts", "own_factor", {"update"}),
    ("own_factor", "experts", "own_factor", {"update"}),
    ("split_leaves_left_out", "experts", "leaves_left_out", {"norm", "update"}),
    ("averaged_norms", "experts", "averaged_norms", {"norm", "update"}),
    ("accumulation_summed", "accumulated", "accumulation_summed", {"norm", "update"}),
    ("after_clip", "replicated", "after_clip", {"norm"}),
    ("scaled_loss", "replicated", "scaled", {"norm", "update"}),
    ("own_dtype", "bfloat16", "low_precision_sum", {"norm", "update"}),
    ("own_dtype", "float16", "squares_overflow", {"norm", "update"}),
    ("reported_in_float32", "bfloat16", "low_precision_sum", {"update"}),
    ("own_nan", "fsdp", "nan_on_one_device", {"norm", "update"}),
    ("norm_without_nan", "replicated", "nan_hidden", {"norm"}),
    # A NaN is seen by the devices whose batch, shard or expert has it.
    ("local_norm", "replicated", "nan_on_one_device", {"norm", "update"}),
    ("local_norm", "experts", "nan_on_one_device", {"norm", "update"}),
    ("own_shard", "fsdp", "nan_on_one_device", {"norm", "update"}),
    ("own_shard", "experts", "nan_on_one_device", {"norm", "update"}),
    ("own_factor", "experts", "nan_on_one_device", {"update"}),
    # No device has it in its norm, and leaves that all hold stay equal.
    ("split_leaves_left_out", "experts", "nan_hidden", {"norm"}),
    ("eps_in_denominator", "small_limit", "eps", {"update"}),
    ("always_scaled", "replicated", "clipped_below_limit", {"update"}),
    ("always_scaled", "small_limit", "clipped_below_limit", {"update"}),
    ("groups_apart", "replicated", "groups_apart", {"update"}),
    ("not_clipped", "replicated", "not_clipped", {"update"}),
    ("not_clipped", "fsdp", "not_clipped", {"update"}),
    ("averaged_twice", "replicated", "averaged_twice", {"norm", "update"}),
    ("scale_in_log", "replicated", "scaled", {"norm"}),
    ("norm_from_adam", "replicated", "after_clip", {"norm"}),
    ("norm_from_adam", "replicated", "groups_apart", {"update"}),
    ("skip_by_clipped_norm", "replicated", "after_clip", {"norm"}),
    ("not_updated", "replicated", "zero_update", {"update"}),
]

ABOVE_BELOW = ("above", "below")


def test_the_kind_of_a_bug_is_named():
    wanted = defaultdict(dict)
    for name, setting, kind, what in WRONG:
        wanted[name, setting][kind] = what
    for (name, setting), kinds in wanted.items():
        rows = optaxclip.check_step(getattr(wrong_steps, name), settings=[setting])
        found = defaultdict(set)
        for row in rows:
            found[row.kind].add(row.what)
        assert found == kinds, (name, setting)


def returning(change):
    """A right step, whose update and norm are changed."""

    def make_step(setting):
        step = right_steps.by_hand(setting)
        return lambda params, batch: change(setting, *step(params, batch))

    return make_step


def times(number, tree):
    return jax.tree.map(lambda x: (number * x).astype(x.dtype), tree)


def test_a_number_that_is_hardly_off_is_found():
    """3e-5 of a number may be rounding, and 2^-6 in 16 bits, and no more."""
    for share in (1 + 4e-5, 1 - 4e-5):
        step = returning(lambda _, x, norm, k=share: (x, norm * k))
        (norm, *_) = rows = optaxclip.check_step(step, settings="replicated")
        assert {(row.what, row.kind) for row in rows} == {("norm", "scaled")}
        assert norm.found == pytest.approx(norm.wanted * share, 1e-5)
        step = returning(lambda _, x, norm, k=share: (times(k, x), norm))
        rows = optaxclip.check_step(step, settings="replicated")
        assert {row.what for row in rows} == {"update"}
    step = returning(lambda _, x, norm: (x, norm * 1.02))
    rows = optaxclip.check_step(step, settings="bfloat16")
    assert [row.what for row in rows] == ["norm"]


@pytest.mark.parametrize("name", right_steps.RIGHT)
def test_a_right_step_is_right_in_every_setting(name):
    assert optaxclip.check_step(right_steps.RIGHT[name]) == []


def test_pmap_is_right_where_devices_hold_all_weights():
    settings = ["replicated", "small_limit", "accumulated", "bfloat16", "float16"]
    assert optaxclip.check_step(right_steps.ours_pmap, settings=settings) == []


def test_a_finding_says_by_how_much():
    step = wrong_steps.every_square_summed
    rows = optaxclip.check_step(step, settings=["replicated"])
    (norm,) = [row for row in rows if row[:3] == ("replicated", "above", "norm")]
    # 37 limits of 0.25.
    assert norm.wanted == pytest.approx(9.25, rel=1e-6)
    # Eight devices, each with all squares.
    assert norm.found == pytest.approx(9.25 * math.sqrt(8), rel=1e-5)
    (update,) = [row for row in rows if row.what == "update"]
    assert update.wanted == pytest.approx(0.25, rel=1e-6)
    assert update.found == pytest.approx(0.25 / math.sqrt(8), rel=1e-5)
    assert "copies" in norm.meaning


def test_a_nan_is_counted_in_devices():
    rows = optaxclip.check_step(wrong_steps.own_shard, settings="fsdp")
    seen = [row[2:5] for row in rows if row.case == "nan"]
    # The shard of one device has it, and no other device clips by it.
    assert seen == [("norm", 8, 1), ("update", 8, 1)]


def test_a_nan_that_the_norm_hides_is_no_difference_of_devices():
    # All eight devices have it in their weights, or those of one shard or expert. None
    # has it in its norm.
    for setting in ("replicated", "fsdp", "experts"):
        rows = optaxclip.check_step(wrong_steps.norm_without_nan, settings=setting)
        assert [row[1:6] for row in rows] == [("nan", "norm", 8, 0, "nan_hidden")]


def test_a_norm_that_is_always_inf_is_no_scale():
    step = returning(lambda _, x, norm: (x, norm * np.inf))
    rows = optaxclip.check_step(step, settings=["replicated", "small_limit"])
    assert {row.kind for row in rows} == {"unknown"}


def test_a_step_that_gives_nan_has_no_known_bug():
    """Its loss divides by 0."""
    step = returning(lambda _, x, norm: (times(np.nan, x), norm * np.nan))
    rows = optaxclip.check_step(step, settings="replicated")
    above = [row for row in rows if row.case == "above"]
    assert np.isnan([row.found for row in above]).tolist() == [True, True]
    assert {row.kind for row in above} == {"unknown"}


def test_a_leaf_of_the_other_sign_is_found():
    def flipped(setting, updates, norm):
        return {**updates, "bias": -updates["bias"]}, norm

    rows = optaxclip.check_step(returning(flipped), settings="fsdp")
    kinds = {(row.case, row.what, row.kind) for row in rows}
    assert kinds == {(case, "update", "groups_apart") for case in ("above", "below")}


def test_a_leaf_that_is_hardly_off_has_its_name():
    """Below the limit a clip by value or of parts gives the right gradient. It is not
    the reason why one leaf is 0.05 % longer.
    """

    def longer(setting, updates, norm):
        return {**updates, "bias": 1.0005 * updates["bias"]}, norm

    for setting in ("replicated", "accumulated"):
        rows = optaxclip.check_step(returning(longer), settings=setting)
        kinds = [(row.case, row.kind) for row in rows]
        assert kinds == [("above", "groups_apart"), ("below", "groups_apart")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_rounded_to_16_bits_are_no_groups(dtype):
    """Their leaves have different factors, but not because each has its own clip."""

    def outcome(setting, grads):
        rounded = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), grads)
        return wrong_steps.clipped(setting, rounded), wrong_steps.global_norm(rounded)

    def make_step(setting):
        return wrong_steps.under_jit(setting, lambda grads, _: outcome(setting, grads))

    rows = optaxclip.check_step(make_step, settings=["replicated", "accumulated"])
    updates = [row for row in rows if (row.case, row.what) == ("above", "update")]
    assert {row.kind for row in updates} == {"other_direction"}
    norms = [row for row in rows if (row.case, row.what) == ("above", "norm")]
    assert {row.kind for row in norms} <= {"unknown"}


def test_a_longer_update_is_no_norm_after_the_clip():
    """Updates of norm 1, above a limit of 1e-6."""

    def outcome(grads, _):
        norm = wrong_steps.global_norm(grads)
        return right_steps.scaled(grads, 1 / norm), norm

    rows = optaxclip.check_step(
        lambda setting: wrong_steps.under_jit(setting, outcome),
        settings=["replicated", "small_limit"],
    )
    kinds = {(row.what, row.case, row.kind) for row in rows}
    assert kinds == {
        ("update", "above", "unknown"),
        ("update", "below", "clipped_below_limit"),
    }


def test_the_gradient_of_the_loss_is_the_mean_of_the_batch():
    def make_step(setting):
        right = right_steps.ours_jit(setting)

        def step(params, batch):
            grads = jax.grad(setting.loss)(params, batch)
            for name, leaf in batch.items():
                wanted = np.asarray(leaf, np.float64).mean(0)
                # Rounding of sums of 8 or 24 numbers. NaN equals NaN.
                bound = 24 * 2.0**-24 * np.nanmax(abs(wanted))
                np.testing.assert_allclose(grads[name], wanted, rtol=0, atol=bound)
            seen.append(setting.name)
            return right(params, batch)

        return step

    seen = []
    settings = ["replicated", "fsdp", "experts", "accumulated"]
    assert optaxclip.check_step(make_step, settings=settings) == []
    assert set(seen) == set(settings)


def test_a_bug_of_another_setting_is_not_looked_for():
    step = wrong_steps.accumulation_summed
    assert optaxclip.check_step(step, settings="replicated") == []


def test_new_params_updates_and_clipped_gradients_are_all_taken():
    for sign in (1, -1):
        step = returning(lambda _, x, norm, k=sign: (times(k, x), float(norm)))
        found = optaxclip.check_step(step, settings=["replicated", "fsdp"])
        assert found == []


def test_the_worst_norm_of_all_devices_is_shown():
    def only_the_last_is_wrong(setting, updates, norm):
        devices = setting.mesh.devices.flat
        copies = [
            jax.device_put(norm * (1 + (k == 7)), d) for k, d in enumerate(devices)
        ]
        sharding = NamedSharding(setting.mesh, P())
        return updates, jax.make_array_from_single_device_arrays((), sharding, copies)

    rows = optaxclip.check_step(returning(only_the_last_is_wrong), settings="fsdp")
    above = [row for row in rows if row.case == "above"]
    assert [(row.what, row.kind) for row in above] == [("norm", "unknown")]
    assert above[0].found == pytest.approx(2 * 9.25, rel=1e-5)


def test_a_step_may_change_its_specs():
    def make_step(setting):
        step = right_steps.ours_jit(setting)
        setting.specs.clear()
        setting.batch_specs.clear()
        return step

    assert optaxclip.check_step(make_step, settings=["fsdp", "accumulated"]) == []
    assert optaxclip.check_step(right_steps.ours_jit, settings="fsdp") == []


@jax.numpy_dtype_promotion("strict")
def test_strict_promotion_is_no_hindrance():
    step = right_steps.ours_jit
    assert optaxclip.check_step(step, settings=["replicated", "bfloat16"]) == []


@pytest.mark.parametrize("settings", [3, None, ["replicated", 3]])
def test_settings_that_are_no_names_are_refused(settings):
    with pytest.raises((TypeError, ValueError), match="check_step: settings must"):
        optaxclip.check_step(right_steps.ours_jit, settings=settings)


def test_another_tree_than_params_is_refused():
    """flax's FrozenDict equals a dict, and is another tree."""
    freeze = pytest.importorskip("flax.core").freeze
    step = returning(lambda _, x, norm: (freeze(x), norm))
    with pytest.raises(ValueError, match="check_step: the step must return"):
        optaxclip.check_step(step, settings="replicated")


def test_an_error_of_the_step_says_in_which_setting():
    def make_step(setting):
        if "experts" not in setting.name:
            return right_steps.ours_jit(setting)
        raise NotImplementedError("no experts here")

    with pytest.raises(NotImplementedError) as caught:
        optaxclip.check_step(make_step, settings=["replicated", "experts"])
    (note,) = caught.value.__notes__
    assert "'experts'" in note
    assert "settings=" in note


def test_weight_decay_and_penalties_show():
    """Weights are not 0, so a step that adds them gives another update."""
    for name in ("decay_before_clip", "penalty_in_loss"):
        rows = optaxclip.check_step(getattr(wrong_steps, name), settings="replicated")
        updates = [row for row in rows if row.what == "update"]
        assert {row.case for row in updates} == {"above", "below"}
        assert {row.kind for row in updates} == {"weights_added"}
        (below,) = [row for row in updates if row.case == "below"]
        # Each of three leaves has one weight of 0.25, the limit.
        decay = {"decay_before_clip": 0.1, "penalty_in_loss": 1e-4}[name]
        assert below.found == pytest.approx(decay * 0.25 * math.sqrt(3), rel=1e-4)


def test_a_scale_of_8_is_no_sum_over_8_devices():
    """Four devices tell them apart: a sum would be 4 there."""
    settings = ["replicated", "small_limit"]
    for name, kind in (("scale_of_8", "scaled"), ("gradients_summed",) * 2):
        rows = optaxclip.check_step(getattr(wrong_steps, name), settings=settings)
        assert {row.kind for row in rows} == {kind}
        ratios = [row.found / row.wanted for row in rows if row.what == "norm"]
        small = 8 if name == "scale_of_8" else 4
        assert ratios == pytest.approx([8, 8, small, small], rel=1e-5)


@pytest.mark.parametrize("ratio", [1 / 8, 1 / 3, 2, 3, 4])
def test_a_ratio_of_all_settings_is_no_number_of_devices(ratio):
    """Each of these is a number of devices, copies or micro-batches in some setting."""

    def other_limit(setting):
        limited = setting._replace(max_norm=setting.max_norm * ratio)
        return right_steps.by_hand(limited)

    steps = {
        "scaled": returning(lambda _, x, norm: (x, norm * ratio)),
        "other_rate": returning(lambda _, x, norm: (times(ratio, x), norm)),
        "other_limit": other_limit,
    }
    for kind, make_step in steps.items():
        settings = ["replicated", "small_limit", "accumulated"]
        rows = optaxclip.check_step(make_step, settings=settings)
        assert {row.kind for row in rows} == {kind}


def clipped_by_weights(setting):
    """A step that clips by the norm of weights, and returns the right norm."""

    def outcome(grads, params):
        number = right_steps.factor(setting, wrong_steps.global_norm(params))
        return right_steps.scaled(grads, number), wrong_steps.global_norm(grads)

    return wrong_steps.under_jit(setting, outcome)


@pytest.mark.parametrize(
    ("make_step", "kind"),
    [
        (wrong_steps.always_scaled, "clipped_below_limit"),
        (clipped_by_weights, "norm_of_weights"),
        (wrong_steps.not_updated, "zero_update"),
    ],
)
def test_a_bug_of_all_settings_is_no_scale(make_step, kind):
    """The norm of these over the right one is equal in all settings."""
    settings = ["replicated", "small_limit", "accumulated", "fsdp", "experts"]
    rows = optaxclip.check_step(make_step, settings=settings)
    assert {row.setting for row in rows} == set(settings)
    assert {(row.what, row.kind) for row in rows} == {("update", kind)}


def test_a_large_eps_is_named_above_and_below_the_limit():
    def outcome(setting, grads):
        norm = wrong_steps.global_norm(grads)
        number = jax.numpy.minimum(1.0, setting.max_norm / (norm + 1e-5))
        return right_steps.scaled(grads, number), norm

    def make_step(setting):
        return wrong_steps.under_jit(setting, lambda grads, _: outcome(setting, grads))

    rows = optaxclip.check_step(make_step, settings=["replicated", "small_limit"])
    seen = [(row.setting, row.case, row.kind) for row in rows]
    assert seen == [("small_limit", "above", "eps"), ("small_limit", "below", "eps")]


@pytest.mark.parametrize(
    "denominator",
    [lambda norm: norm + 1e-6, lambda norm: norm / 2],
    ids=["eps", "limit"],
)
def test_a_clip_without_a_minimum_is_named_beside_another_bug(denominator):
    """Below the limit it makes updates longer than a loss scale does."""

    def outcome(setting, grads):
        norm = wrong_steps.global_norm(grads)
        return right_steps.scaled(grads, setting.max_norm / denominator(norm)), norm

    def make_step(setting):
        return wrong_steps.under_jit(setting, lambda grads, _: outcome(setting, grads))

    for settings in ("replicated", ["replicated", "small_limit"]):
        rows = optaxclip.check_step(make_step, settings=settings)
        kinds = {row.kind for row in rows if row.case == "below"}
        assert kinds == {"clipped_below_limit"}


def test_a_step_of_the_last_microbatch_has_its_name():
    def make_step(setting):
        def step(params, batch):
            grads = jax.grad(setting.loss)(params, batch)
            return wrong_steps.clipped(setting, grads), wrong_steps.global_norm(grads)

        return lambda params, batch: step(
            params, right_steps.microbatches(setting, batch)[-1]
        )

    rows = optaxclip.check_step(make_step, settings="accumulated")
    seen = [row[1:3] for row in rows if row.kind == "microbatches_apart"]
    assert seen == [(case, what) for case in ABOVE_BELOW for what in ("norm", "update")]


def test_a_step_without_microbatches_does_not_clip_them_apart():
    """One device returns the norm after the clip, and the others the norm before it."""

    def make_step(setting):
        def step(params, batch):
            grads = right_steps.averaged(setting, batch)
            norm = jnp.sqrt(sum(right_steps.squares(grads).values()))
            factor = right_steps.factor(setting, norm)
            is_first = jax.lax.axis_index("data") == 0
            returned = jnp.where(is_first, factor * norm, norm)
            return right_steps.scaled(grads, factor), returned

        return right_steps.mapped(setting, step)

    rows = optaxclip.check_step(make_step, settings="replicated")
    assert [row[1:3] for row in rows] == [("above", "norm")]
    assert rows[0].kind == "unknown"


@pytest.mark.parametrize("penalty", [0.2, 0.4])
def test_a_large_penalty_on_weights_has_its_name(penalty):
    """It counts in the norm before the clip, and is shortened by the clip."""

    def outcome(setting, grads, params):
        grads = jax.tree.map(lambda x, w: x + penalty * w, grads, params)
        return wrong_steps.clipped(setting, grads), wrong_steps.global_norm(grads)

    def make_step(setting):
        return wrong_steps.under_jit(
            setting, lambda grads, params: outcome(setting, grads, params)
        )

    rows = optaxclip.check_step(make_step, settings=["replicated", "small_limit"])
    assert {row.kind for row in rows} == {"weights_added"}
    assert {row.what for row in rows} == {"norm", "update"}


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_added_after_the_step_are_found(sign):
    """A step that adds params to new params, or takes them from updates."""

    def make_step(setting):
        right = right_steps.by_hand(setting)

        def step(params, batch):
            updates, norm = right(params, batch)
            new = jax.tree.map(
                lambda w, x: (w - x) + w if sign > 0 else x - w, params, updates
            )
            return new, norm

        return step

    rows = optaxclip.check_step(make_step, settings=["replicated", "fsdp"])
    seen = [(*row[:3], row.kind) for row in rows]
    assert seen == [
        (setting, case, "update", "weights_added")
        for setting in ("replicated", "fsdp")
        for case in ABOVE_BELOW
    ]


@pytest.mark.parametrize("share", [0.9, 0.96, 1.1])
def test_a_low_precision_sum_loses_small_squares_and_no_more(share):
    """Of squares that add to 2^22 and 64 times 9216, all small ones may be lost."""
    total = 2**22 + 64 * 9216
    least = math.sqrt(2**22 / total)
    step = returning(lambda _, x, norm: (x, norm * share))
    (row,) = optaxclip.check_step(step, settings="bfloat16")
    assert row.wanted == pytest.approx(math.sqrt(total), rel=2**-8)
    within = least * (1 - 2**-6) <= share < 1
    assert row.kind == ("low_precision_sum" if within else "unknown")


def test_a_sum_of_the_norms_of_devices_is_told_as_one():
    """The gradients are averaged, and `lax.psum` of their norm is n times as large."""

    def summed(setting, updates, norm):
        return updates, norm * setting.mesh.shape["data"]

    rows = optaxclip.check_step(returning(summed), settings=["replicated"])
    assert [(row.kind, row.what) for row in rows] == [("gradients_summed", "norm")] * 2
    assert all("or their norms" in row.meaning for row in rows)


def test_a_step_in_place_of_make_step_is_told():
    step = jax.jit(lambda params, batch: (params, 0.0))
    with pytest.raises(TypeError, match=r"must take a setting .* argument: 'batch'"):
        optaxclip.check_step(step)
