"""What a test of a trainer calls: `assert_right`, and `of_train_state`."""

import jax
import optax
import pytest

from optaxclip.check import assert_right, of_train_state

from . import right_steps, wrong_steps

# The settings that a step without specs runs in.
SETTINGS = ["replicated", "small_limit", "accumulated"]


def test_a_right_step_passes():
    assert assert_right(right_steps.ours_jit, settings="replicated") is None


def test_a_wrong_step_raises_with_a_table():
    with pytest.raises(AssertionError) as caught:
        assert_right(wrong_steps.not_clipped, settings=SETTINGS)
    heading, columns, *rows, meaning = str(caught.value).splitlines()
    assert heading == "check_step found what is wrong:"
    assert columns.split()[-3:] == ["wanted", "found", "kind"]
    assert [row.split()[:3] for row in rows] == [
        [setting, "above", "update"] for setting in SETTINGS
    ]
    assert meaning.startswith("not_clipped: ")


def create(**fields):
    """The train state of flax, which MaxText has too."""
    train_state = pytest.importorskip("flax.training.train_state")
    return train_state.TrainState.create(**fields)


def flax_step(state, batch, loss):
    """A step as in flax's examples. It logs a norm."""
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
    return state.apply_gradients(grads=grads), metrics


def test_a_step_of_a_train_state_is_checked_in_three_lines():
    make_step = of_train_state(
        flax_step, create, optax.clip_by_global_norm, lambda log: log["grad_norm"]
    )
    assert_right(make_step, settings=[*SETTINGS, "fsdp", "experts"])


def test_a_step_of_a_train_state_is_one_program():
    """Which check_step asks for, as many programs may wait for each other."""

    def train_step(state, batch, loss):
        assert isinstance(state.params["bias"], jax.core.Tracer)
        return flax_step(state, batch, loss)

    make_step = of_train_state(
        train_step, create, optax.clip_by_global_norm, lambda log: log["grad_norm"]
    )
    assert_right(make_step, settings="replicated")


def maxtext_step(state, batch, loss):
    """A step as MaxText's: the norm in its log is that of clipped gradients."""
    raw_grads = jax.grad(loss)(state.params, batch)
    clip = optax.clip_by_global_norm(0.25)  # the limit of "replicated"
    grads, _ = clip.update(raw_grads, clip.init(raw_grads))
    scalars = {
        "learning/raw_grad_norm": optax.tree.norm(raw_grads),
        "learning/grad_norm": optax.tree.norm(grads),
    }
    return state.apply_gradients(grads=grads), {"scalar": scalars}


@pytest.mark.parametrize(("key", "is_right"), [("raw_grad_norm", 1), ("grad_norm", 0)])
def test_the_metrics_may_be_of_any_form(key, is_right):
    def norm(metrics):
        return metrics["scalar"][f"learning/{key}"]

    make_step = of_train_state(maxtext_step, create, optax.clip_by_global_norm, norm)
    if is_right:
        assert_right(make_step, settings="replicated")
    else:
        with pytest.raises(AssertionError, match="after_clip"):
            assert_right(make_step, settings="replicated")
