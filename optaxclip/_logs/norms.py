"""Which columns are norms of the gradient, and which is the loss."""

import re

import numpy as np

from .columns import Column, Log, in_common

# Patterns of norms of the gradient, the surest first. They fit names in lower case, in
# which a blank replaces all punctuation.
NORM_PATTERNS = (
    # clip/norm_before, record/norm, of this library
    r"((.* )?clip( \d+)?( .*)? )?norm before",
    r"(.* )?record( \d+)?( .*)? norm",
    # learning/raw_grad_norm. MaxText and others log the norm after clipping beside it,
    # under a shorter name.
    r"(.* )?(raw|unclipped|total|global|pre clip) (gradient|grad) ?norm",
    # train/grad_norm, gnorm, grad_2.0_norm_total, grad_norm_before_clipping,
    # l2_norm/grad/global, l2_grads
    r"(.* )?(gradients?|grads?|g) ?(l2|2 0|inf|global)? ?norm"
    r"( (total|global|all|l2|step|before|(before|pre) ?clip(ping)?( step)?))?"
    r"|(.* )?(l2 norm grad global|l2 grads|(global|total) norm)",
    # skip/norm, norm
    r"(.* )?skip( \d+)?( .*)? norm",
    r"(train |training )?norm",
)
# Words in names of settings, of norms after clipping, and of norms of other things.
OTHER_WORDS = re.compile(
    r"\b(args?|config|cfg|hparams?|max|min|target|limit|threshold"
    r"|clip|clipped|clipping|after|post"
    r"|params?|parameters?|weights?|updates?|moment|adam|layer|batch|loss|residual"
    r"|noise|diff|relative|coef|penalty|ema|rms|std|var|scale|ratio"
    r"|time|ms|count|nonfinite)\b"
)
# record/norm/w, grad_2.0_norm/w, and not grad_norm/clipped or grad_norm/max
TENSOR_PATTERN = re.compile(
    r"(.*/)?(norm_before|record(_\d+)?/(.+/)?norm|(gradient|grad)s?(_2\.0)?_norm)/"
    r"(?!clipped$|after_|(min|max|mean|std|ema)$).+"
)
# train/loss, total_loss, avg_loss, train_loss_step, Loss/train
LOSS_PATTERN = re.compile(
    r"(?!.*(?<![a-z])(val|eval|test|aux))"
    r"((.*/)?((train|training|tr|total|lm|avg|average|mean)[/._ -])?loss"
    r"(_step|_epoch|[/_](train|total))?)"
)
# val_loss, eval/loss, test_loss, eval_wikitext_loss, Loss/val
VALIDATION_PATTERN = re.compile(
    r"(.*[/._ -])?(val|valid(ation)?|eval(uation)?|test|dev)[/._ -](.*[/._ -])?loss"
    r"|(.*/)?loss[/_](val|valid(ation)?|eval(uation)?|test|dev)"
)
# noise_share, train/noise_share
NOISE_SHARE = re.compile("(.*/)?noise_share")
# Norms of record_health: health/norm, health/gradients/norm/w
HEALTH_PATTERN = re.compile(r"(.*[/. ])?health(_\d+)?/(.*/)?norm(/.*)?")


def norms_of(log: Log) -> list[Column]:
    """The columns whose names say that they are norms of the gradient: one, or one for
    each optimizer. Only the surest pattern that fits a name counts.
    """
    names = [name for name in log.columns if not _is_other_norm(name, log)]
    for pattern in NORM_PATTERNS:
        norms = [name for name in names if re.fullmatch(pattern, _words_of(name))]
        if norms:
            return [_with_skipped_steps(log, log.columns[name]) for name in norms]
    return []


def _words_of(name: str) -> str:
    """The words of a name: "train grad norm"."""
    return re.sub("[^a-z0-9]+", " ", _without_run(name)).strip()


def _without_run(name: str) -> str:
    """A name without the run that W&B writes first: "sun-7 - train/grad_norm"."""
    return name.rpartition(" - ")[2].lower()


def _is_other_norm(name: str, log: Log) -> bool:
    """Whether a column is a setting, or the norm of something else."""
    # record_health has norms of tensors, and in a summary the largest of them.
    if HEALTH_PATTERN.fullmatch(name):
        return True
    # metrics(summary=True) logs the norm of the worst tensor only, and which tensor it
    # is in worst_index. If that is always 0, there is probably only one tensor.
    prefix = name.removesuffix("_before").removesuffix("norm")
    worst_index = log.columns.get(f"{prefix}worst_index")
    if worst_index is not None and worst_index.values.any():
        return True
    # In Loss/grad_norm, "Loss" is a group of TensorBoard. In clip/norm_before, "clip"
    # is the name of a clipper.
    words = _words_of(re.sub("(?i)(?<![^/ ])loss/", "", name))
    clip_before = r"clip( \d+)?(?=( .*)? norm before)|\b(before|pre) clip(ping)?\b"
    return OTHER_WORDS.search(re.sub(clip_before, "", words)) is not None


def _with_skipped_steps(log: Log, column: Column) -> Column:
    """The norms of a clipper, also in steps that a wrapper skipped.

    A clipper inside the wrapper does not see a skipped step, and logs its earlier norm
    again. A wrapper behind the clipper logs the norm after the clip, which is shorter.
    So in a skipped step the norm of the wrapper counts if it is longer, or if the
    clipper repeats its norm.
    """
    clipper = r"(clip|record)(_\d+)?/(.*?)norm(_before)?$"
    prefix = re.sub(clipper, r"skip\2/\3", column.name)
    wrapper = log.columns.get(f"{prefix}norm")
    flags = log.columns.get(f"{prefix}skipped")
    if wrapper is None or flags is None:
        return column
    steps, (norms_of_wrapper, norms, skipped) = in_common([wrapper, column, flags])
    is_repeated = norms == np.append(np.nan, norms)[:-1]
    # NaN counts as longer.
    is_longer = ~(norms_of_wrapper <= norms)
    takes_wrapper = (skipped > 0) & (is_repeated | is_longer)
    values = column.values.copy()
    is_in_common = np.isin(column.steps, steps)
    values[is_in_common] = np.where(takes_wrapper, norms_of_wrapper, norms)
    return column._replace(values=values)


def loss_of(log: Log, pattern: re.Pattern[str] = LOSS_PATTERN) -> Column | None:
    """The column of the training loss, by its name: the longest one, or None. With
    VALIDATION_PATTERN the loss of a validation.
    """
    losses = columns_named(pattern, log)
    return max(losses, key=lambda column: len(column.steps), default=None)


def columns_named(pattern: re.Pattern[str], log: Log) -> list[Column]:
    """The columns whose names, in lower case, fit a pattern."""
    return [
        column
        for name, column in log.columns.items()
        if pattern.fullmatch(_without_run(name))
    ]
