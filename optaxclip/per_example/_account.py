"""The account of private training, by dp-accounting:

epsilon            what a noise multiplier is worth
noise_multiplier   the noise that an epsilon needs
"""

import math
from typing import Any

from .._arguments.checks import check_number, check_whole_number, shown


def epsilon(
    noise_multiplier: float, share: float, *, steps: int, delta: float
) -> float:
    """Returns the epsilon of training with `draw`, `clipped_grad` and `add_noise`:
    (epsilon, delta)-differential privacy for adding or removing one example.

    A thin call of `dp_accounting.pld.PLDAccountant`. `add_noise` makes its noise
    from limit and rounding, so the multiplier alone counts. What `draw` leaves out of a
    full batch is added to delta (docs/private_training.md).

    Args:
      noise_multiplier: of `add_noise`, at least 0. With 0 epsilon is inf, with inf it
        is 0.
      share: of `draw`: the probability that an example joins a batch, above 0 and at
        most 1.
      steps: how many steps are taken, at least 1.
      delta: the probability with which epsilon may be exceeded, above 0 and at most 1.
        Usually less than 1 over the number of examples.

    Returns:
      A float.

    Raises:
      ValueError: steps that are not a whole number, a negative or NaN noise multiplier,
        a share or a delta that is not between 0 and 1, and what dp-accounting refuses.
      TypeError: a number that is none.
      ImportError: dp-accounting is not installed.

    Example:
      >>> from optaxclip.per_example import epsilon
      >>> round(epsilon(1.0, 0.1, steps=300, delta=1e-4), 2)
      10.81

    Reference: Sommer, Meiser, Mohammadi, Privacy loss classes: the central limit
    theorem in differential privacy, 2019. Koskela, Jälkö, Honkela, Computing tight
    differential privacy guarantees using FFT, 2020 (arXiv 1906.03049).
    """
    _check_training("epsilon", share, steps, delta)
    check_number("epsilon: noise_multiplier", noise_multiplier, is_scalar=True)
    # dp-accounting raises for it.
    if noise_multiplier == math.inf:
        return 0.0
    dp_accounting = _dp_accounting()
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(_training(dp_accounting, noise_multiplier, share, steps))
    return float(accountant.get_epsilon(delta))


def noise_multiplier(
    epsilon: float, share: float, *, steps: int, delta: float
) -> float:
    """Returns the least noise multiplier whose `epsilon` is not exceeded: the inverse
    of `optaxclip.per_example.epsilon`, to 1e-6. It takes some seconds.

    A thin call of `dp_accounting.calibrate_dp_mechanism`.

    Args:
      epsilon: the epsilon of the whole training, above 0. inf, or a delta of 1,
        needs no noise.
      share: as in `epsilon`.
      steps: as in `epsilon`.
      delta: as in `epsilon`.

    Returns:
      A float, for `add_noise`.

    Raises:
      ValueError: an epsilon, share or delta of 0 or below, and as in `epsilon`.
      TypeError: as in `epsilon`.
      ImportError: as in `epsilon`.

    Example:
      >>> from optaxclip.per_example import noise_multiplier
      >>> round(noise_multiplier(3.0, 0.1, steps=300, delta=1e-4), 2)
      2.29

    Reference: as of `epsilon`.
    """
    _check_training("noise_multiplier", share, steps, delta)
    check_number("noise_multiplier: epsilon", epsilon, is_scalar=True)
    for name, number in {"epsilon": epsilon, "share": share, "delta": delta}.items():
        if number == 0:
            raise ValueError(
                f"noise_multiplier: {name} must be above 0, got {shown(number)}."
            )
    # Sweeps over epsilon end with inf, for training without privacy.
    if epsilon == math.inf or delta == 1:
        return 0.0
    dp_accounting = _dp_accounting()

    def training(noise: float) -> Any:
        return _training(dp_accounting, noise, share, steps)

    accountant = dp_accounting.pld.PLDAccountant
    noise = dp_accounting.calibrate_dp_mechanism(accountant, training, epsilon, delta)
    return float(noise)


def _check_training(call: str, share: Any, steps: Any, delta: Any) -> None:
    """Refuses numbers that no training has. For a delta of 1e5 in place of 1e-5,
    dp-accounting would return an epsilon of 0.
    """
    check_number(f"{call}: share", share, highest=1.0, is_scalar=True)
    check_whole_number(f"{call}: steps", steps)
    check_number(f"{call}: delta", delta, highest=1.0, is_scalar=True)


def _dp_accounting() -> Any:
    """The package, which takes seconds to import."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ModuleNotFoundError as error:
        raise ImportError(
            "the account needs dp-accounting: run pip install dp-accounting."
        ) from error
    return dp_accounting


def _training(dp_accounting: Any, noise: float, share: float, steps: int) -> Any:
    """All steps of a training, as an event of dp-accounting."""
    step = dp_accounting.GaussianDpEvent(float(noise))
    step = dp_accounting.PoissonSampledDpEvent(float(share), step)
    # dp-accounting takes no whole number but an int of Python.
    return dp_accounting.SelfComposedDpEvent(step, int(steps))
