"""The table of causes: what each needs, how it is seen, and what helps."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import _rules as rules
from . import _signals as signals


class Finding(NamedTuple):
    """One cause, and the number that shows it.

    Attributes:
      cause: a name of the table in docs/doctor.md, such as "bad batch".
      step: the first one that shows it.
      worst: the step that shows it most.
      rows: how many rows of the log show it.
      early_steps: the first of their steps, at most six.
      value: the number in the worst step.
      limit: what it was held against.
      evidence: the number in words, with the columns or tensors.
      page: where the documentation says more, such as "docs/doctor.md (Record)", a file
        of the repository and the title of a section.
      advice: what to do, in a line.
      first_steps: for each column or tensor that shows the cause, the first step that
        does, such as {"loss": 41, "health/w": 40}.
    """

    cause: str
    step: int
    worst: int
    rows: int
    early_steps: list[int]
    value: float
    limit: float
    evidence: str
    page: str
    advice: str
    first_steps: dict[str, int]


class Cause(NamedTuple):
    """A row of the table."""

    name: str
    needs: str  # the columns that the rule reads, a constant of `_signals`
    rule: Callable[..., np.ndarray | float]  # from the numbers of these columns
    limit: float  # a row whose number is above it shows the cause
    evidence: str  # in words, with {value} and {subject}, the names of columns
    page: str
    advice: str
    # Whether it is about how a log or an optimizer is set up, and not about what broke.
    is_of_setup: bool = False
    # Whether other columns may say that nothing is wrong: a stage or a reward changes
    # with the loss, or the network has learnt its task.
    may_be_right: bool = False
    takes_nonfinite: bool = False  # whether the rule also gets rows with NaN and inf
    least_rows: int = 1  # with fewer rows the cause is not judged


# Names of causes that other modules look for.
NOT_FINITE = "not finite"
BAD_BATCH = "bad batch"
CHANGE_OF_SCALE = "change of scale"
DIVERGENCE = "divergence"
LEARNING_RATE = "learning rate"
SHRINKING_WEIGHTS = "shrinking weights"

PAGE_AT_ONE_STEP = "docs/doctor.md (What changes at one step)"
PAGE_OF_SPIKES = "docs/run_health.md (My loss spikes, or gradients explode)"
ROLLBACK = "go back to a checkpoint, with a clip or a lower rate"
SCALE_ADVICE = (
    "look at the loss scale, at sum or mean, at the number of devices, at the batch "
    "size, at the learning rate, and at the data"
)
GROWTH_ADVICE = (
    "a lower learning rate, or weight decay. Or are gradients added up and never reset?"
)
# Named only if another cause begins, or is worst, from ten rows before the leap to 20
# rows after it: the schedule of a healthy run may leap too.
LEAP_OF_RATE = Cause(
    name=LEARNING_RATE,
    needs=signals.RATE,
    rule=rules.leap_of_rate,
    limit=rules.LEAP,
    evidence="{subject} leaps to {value:.3g} times the rows before",
    page="docs/doctor.md (When a cause is named)",
    advice="look at the schedule: take a lower rate, or a longer warm-up",
)
# If two of these begin in the same step, a report names the upper one first. Limits
# were set on one half of the trainings in benchmarks/doctor.
CAUSES = (
    Cause(
        name=NOT_FINITE,
        needs=signals.LOSS_OR_NORM,
        rule=rules.not_finite,
        limit=0,
        evidence="NaN or inf begins in {subject}",
        page="docs/doctor.md (Where a NaN begins)",
        advice=(
            "skip_nonfinite, and look at batch, backward pass and optimizer there. If "
            "the run has a loss scale, lower it, or make it dynamic. If it still skips "
            "all steps, take bfloat16"
        ),
        takes_nonfinite=True,
    ),
    Cause(
        name="gradients add up",
        needs=signals.NORM,
        rule=rules.gradients_added_up,
        limit=0,
        evidence=(
            "{subject} grows to {value:.3g} times its first row, and hardly changes "
            "from row to row"
        ),
        page=PAGE_AT_ONE_STEP,
        advice=(
            "gradients of earlier steps seem to be added: take those of this step "
            "alone (PyTorch: zero_grad)"
        ),
        least_rows=20,
    ),
    Cause(
        name=LEARNING_RATE,
        needs=signals.LOSS,
        rule=rules.blown_up_at_once,
        limit=rules.BLOWN_UP_AT_ONCE,
        evidence="{subject} is {value:.3g} times its first row a few rows later",
        page=PAGE_AT_ONE_STEP,
        advice="take a lower rate, or a longer warm-up",
        may_be_right=True,
        least_rows=3,
    ),
    Cause(
        name=LEARNING_RATE,
        needs=signals.NORM,
        rule=rules.spikes_before_nan,
        limit=rules.LEAST_SPIKE,
        evidence=(
            "{subject} has spikes again and again until it is NaN, the largest of "
            "{value:.3g} times the median of the rows before"
        ),
        page=PAGE_OF_SPIKES,
        advice=(
            "take a lower rate, or a longer warm-up, and look at the sign of weight "
            "decay. If the spikes are always of the same examples, look at these"
        ),
        takes_nonfinite=True,
        least_rows=30,
    ),
    Cause(
        name=BAD_BATCH,
        needs=signals.NORM,
        rule=rules.bad_batch,
        limit=rules.LEAST_SPIKE,
        evidence="{subject} is {value:.3g} times the median of the rows before",
        page=PAGE_OF_SPIKES,
        advice=(
            "look at that batch: a clip shortens its step, skip_step leaves it out. If "
            "such steps become frequent, or the loss stays high, the rate is too high"
        ),
        may_be_right=True,
        least_rows=3,
    ),
    Cause(
        name=CHANGE_OF_SCALE,
        needs=signals.NORM_AND_ANY_LOSS,
        rule=rules.growth_of_scale,
        limit=1.7,
        evidence="{subject} is {value:.4g} times as long from there on",
        page=PAGE_AT_ONE_STEP,
        advice=SCALE_ADVICE,
        least_rows=20,
    ),
    Cause(
        name=CHANGE_OF_SCALE,
        needs=signals.NORM_AND_ANY_LOSS,
        rule=rules.fall_of_scale,
        limit=1.7,
        evidence="{subject} is {value:.4g} times as short from there on",
        page=PAGE_AT_ONE_STEP,
        advice=SCALE_ADVICE,
        least_rows=20,
    ),
    Cause(
        name=DIVERGENCE,
        needs=signals.LOSS,
        rule=rules.divergence,
        limit=1.1,
        evidence="{subject} rises to {value:.3g} times its lowest level, and stays up",
        page=PAGE_AT_ONE_STEP,
        advice=ROLLBACK,
        may_be_right=True,
        least_rows=rules.LEAST_ROWS_OF_LOSS,
    ),
    Cause(
        name=LEARNING_RATE,
        needs=signals.LOSS,
        rule=rules.height_of_loss,
        limit=rules.NEVER_FALLS,
        evidence="{subject} never falls, and ends at {value:.3g} times its start",
        page=PAGE_AT_ONE_STEP,
        advice=(
            "take a lower rate, or a longer warm-up, and look at the sign of the "
            "update. It may be right if data or objective become harder"
        ),
        may_be_right=True,
        least_rows=rules.LEAST_ROWS_OF_HEIGHT,
    ),
    Cause(
        name="steady growth",
        needs=signals.NORM,
        rule=rules.growth,
        limit=10,
        evidence="{subject} grows {value:.3g} times since its second fifth",
        page=PAGE_OF_SPIKES,
        advice=GROWTH_ADVICE,
        least_rows=40,
    ),
    Cause(
        name="steady growth",
        needs=signals.NORM,
        rule=rules.late_growth,
        limit=20,
        evidence="{subject} grows to {value:.3g} times its median",
        page=PAGE_OF_SPIKES,
        advice=GROWTH_ADVICE,
        least_rows=40,
    ),
    Cause(
        name="vanishing",
        needs=signals.NORM_AND_LOSS,
        rule=rules.vanishing,
        limit=rules.VANISHED,
        evidence="{subject} falls to nearly 0, and the loss does not",
        page="docs/doctor.md (No gradient)",
        advice="look for dead units, a loss scale that underflows, a stop_gradient",
        least_rows=20,
    ),
    Cause(
        name=LEARNING_RATE,
        needs=signals.UPDATES,
        rule=rules.high_update_ratio,
        limit=rules.HIGH_RATIO,
        evidence="updates are {value:.2g} of the weights",
        page=PAGE_OF_SPIKES,
        advice="a lower learning rate, or a longer warm-up",
        takes_nonfinite=True,
        least_rows=5,
    ),
    Cause(
        name="growing weights",
        needs=signals.WEIGHTS,
        rule=rules.growth,
        # Weights that the rule finds to grow end above 1.3**3 = 2.2. The limit only
        # decides which step is the first.
        limit=2,
        evidence="weights grow {value:.3g} times since the second fifth of the log",
        page="docs/doctor.md (Record)",
        advice="look at the sign of weight decay, and at the learning rate",
        least_rows=40,
    ),
    Cause(
        name=SHRINKING_WEIGHTS,
        needs=signals.WEIGHTS,
        rule=rules.shrinking,
        # Weights that the rule finds end below a tenth of the first ones. The limit
        # only decides which step is the first.
        limit=2,
        evidence="weights shrink: the first ones are {value:.3g} times as long",
        page="docs/doctor.md (Record)",
        advice="look at weight decay, and at what else scales or resets weights",
        least_rows=20,
    ),
    Cause(
        name="lost updates",
        needs=signals.ROUNDING,
        rule=rules.lost_updates,
        limit=1,
        evidence=(
            "updates of {subject} are {value:.3g} times too small for the dtype of the "
            "weights"
        ),
        page="docs/sharp_edges.md (Mixed precision and loss scaling)",
        advice="float32 weights beside those of 16 bits, or a higher learning rate",
        least_rows=10,
    ),
    Cause(
        name="no gradient",
        needs=signals.GRADIENTS,
        rule=rules.no_gradient,
        limit=0,
        evidence="the gradient of {subject} is 0 from there to the end",
        page="docs/doctor.md (No gradient)",
        advice="look for a stop_gradient, dead units, or a part that is not called",
        least_rows=20,
    ),
    Cause(
        name="underflow",
        needs=signals.SUBNORMALS,
        rule=rules.underflow,
        limit=0.25,
        evidence="{value:.0%} of the nonzero elements of {subject} are subnormal",
        page="docs/sharp_edges.md (Mixed precision and loss scaling)",
        advice="a larger loss scale, or bfloat16",
        least_rows=5,
    ),
    Cause(
        name="dead embedding",
        needs=signals.DEAD_ROWS,
        rule=rules.dead_embeddings,
        limit=0.2,
        evidence="{value:.0%} of the rows of {subject} have no gradient any more",
        page="docs/doctor.md (Dead rows)",
        advice="look at the tokens, and at weight decay of rows that are not read",
    ),
    Cause(
        name="attention logits",
        needs=signals.LOGITS,
        rule=np.asarray,  # the column itself
        limit=100,  # of Kimi K2
        evidence="{subject} is {value:.4g}",
        page="docs/large_models.md (Attention logits: QK-Clip)",
        advice="qk_clip after the optimizer, or a norm of queries and keys",
    ),
    Cause(
        name="norm after clip",
        needs=signals.EVERY_NORM,
        rule=rules.norm_after_clip,
        limit=0,
        evidence="{value:.0%} of the rows of {subject} are within 0.1 % of the largest",
        page="docs/choosing_a_limit.md (Norms after a clip)",
        advice="log the norm before the clip: spikes cannot be seen in this one",
        is_of_setup=True,
    ),
    Cause(
        name="clipped always",
        needs=signals.CLIP,
        rule=rules.clipped_always,
        limit=10,
        evidence="{subject} is {value:.3g} times its limit in the median of all rows",
        page="docs/choosing_a_limit.md",
        advice="with plain SGD a higher limit. With Adam this one may stay. From 100 "
        "times on look at the loss scale, and at sum or mean",
        is_of_setup=True,
        least_rows=20,
    ),
    Cause(
        name="skip behind clip",
        needs=signals.SKIP_AND_CLIP,
        rule=rules.skip_behind_clip,
        limit=1,
        evidence=(
            "{subject} never exceeds the clip limit, even when the gradient is "
            "{value:.3g} times that"
        ),
        page="docs/sharp_edges.md (A skip behind a clipper)",
        advice="skip_step(optax.chain(clipper, optimizer)), no clipper in front",
        is_of_setup=True,
    ),
)
