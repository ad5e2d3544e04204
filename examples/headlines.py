"""Two claims that papers prove of gradient clipping, to be seen: it keeps out rare
large jumps, and needs fewer steps where curvature grows with the slope.

Jumps (Gorbunov et al., their toy problem). f(x) = |x|^2 / 2 in 100 dimensions, step
0.001. The gradient comes with noise whose coordinates have mean 0 and variance 1:
normal, Weibull with shape 0.2, Burr with shapes 1 and 2.3. Theory in expectation sees
the variance only and cannot tell the three apart. From the minimum, and once it has
had a fifth of the steps to settle, |x| is recorded at every step of many runs. With
normal noise it stays near its median. With heavy tails SGD is thrown several times as
far now and then, and needs many steps to come back. Clipped at 100 as in the paper, ten
times the root mean square of the noise's norm, few steps are shortened and no run
jumps. The price is in the column bias: these noises are skewed, clipping cuts off the
long side, and the mean of x leaves the minimum.

Steps (Zhang et al.). f(x) = x^4 has no bound on its curvature: the largest stable fixed
step is 1 / (2 x0^2) for a start at x0, and is far too short at the flat bottom. Sought
in fine logarithmic grids are the one step size, and the one pair of step size and
limit, with which every start up to x0 gets to |f'| <= 0.01 soonest. The starts are x0
and 63 at random below it. One start alone would say nothing: the step 1 / (4 x0^2)
leads from x0 into the minimum at once. The number of fixed steps grows as x0^2. Clipped
runs go down the slope at the speed step * limit and have a long step left for the
bottom. To balance the two phases makes their number grow as x0^(2/3) in the end,
somewhat faster here. With the pair of the smallest start kept it is in proportion to x0
in the end.

What it does not show. That SGD must be this bad: a smaller step or averaging helps
against jumps, too. That training is like x^4: both sides of the second table are tuned
with hindsight, and the gradients have no noise.

How long it takes. Under a minute on two CPU cores.

What it prints. The two tables. --save PATH draws a picture of how often |x| is beyond
multiples of its median, and of the steps over the starts.

    python examples/headlines.py --seeds 64

Reference: Gorbunov, Danilova, Gasnikov, Stochastic optimization with heavy-tailed noise
via accelerated gradient clipping, 2020 (arXiv 2005.10785). Zhang, He, Sra, Jadbabaie,
Why gradient clipping accelerates training, 2020 (arXiv 1905.11881).
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optaxclip

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    error.add_note('Install what this program needs: pip install -e ".[examples]"')
    raise

DIMENSIONS, STEP_SIZE, LIMIT = 100, 1e-3, 100.0
GRADIENT, MOST_STEPS, LANES = 0.01, 1_000_000, 64
COLOURS = {"normal": "#009e73", "Weibull": "#d55e00", "Burr": "#0072b2"}


class Tail(NamedTuple):
    """How far from the minimum one method is with one noise. Over all runs and steps
    after the first fifth.
    """

    noise: str
    method: str
    median: float  # of |x|
    high: float  # the 99.9th percentile
    largest: float
    jumps: int  # runs in which |x| was at some step more than twice the median
    clipped_share: float
    bias: float  # |mean of x|
    distances: np.ndarray  # float32[runs, steps]: |x|


class Descent(NamedTuple):
    """The fewest steps with which all starts up to x0 arrive, and what they were made
    with.
    """

    start: float
    fixed: int
    fixed_step: float
    clipped: int
    clipped_step: float
    limit: float
    kept: int  # clipped, with the step and limit of the first row


def main(
    seeds: int = 32,
    steps: int = 15_000,
    *,
    starts: Sequence[float] = (10.0, 20.0, 40.0, 80.0),
    save: str | Path | None = None,
) -> tuple[list[Tail], list[Descent]]:
    """Prints both tables, draws a picture if one is wanted, and returns the tables."""
    tails = [row for noise in NOISES for row in tails_of(noise, seeds, steps)]
    print_tails(tails, seeds, steps)
    descents = compare_descents(starts)
    print_descents(descents)
    if save is not None:
        draw(tails, descents, save)
        print(f"\nThe picture is in {save}")
    return tails, descents


def exponential(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # All 32 random bits, where jax.random.exponential has 23: the tails are made by the
    # one draw in ten million.
    return -jnp.log(
        (jax.random.bits(key, shape, jnp.uint32).astype(jnp.float32) + 0.5) * 2.0**-32
    )


def weibull(key: jax.Array, shape: tuple[int, ...], c: float = 0.2) -> jax.Array:
    """P(X > x) = exp(-x^c), centred and scaled to variance 1."""
    mean, square = math.gamma(1 + 1 / c), math.gamma(1 + 2 / c)
    return (exponential(key, shape) ** (1 / c) - mean) / math.sqrt(square - mean**2)


def burr(key: jax.Array, shape: tuple[int, ...], d: float = 2.3) -> jax.Array:
    """P(X > x) = (1 + x)^-d, centred and scaled to variance 1."""
    mean, variance = 1 / (d - 1), d / ((d - 1) ** 2 * (d - 2))
    return (jnp.expm1(exponential(key, shape) / d) - mean) / math.sqrt(variance)


NOISES = {"normal": jax.random.normal, "Weibull": weibull, "Burr": burr}
METHODS = {"SGD": math.inf, "clipped SGD": LIMIT}


def tails_of(noise: str, seeds: int, steps: int) -> list[Tail]:
    """Many runs of both methods, all from the same seeds and so on the same noise."""
    run = functools.partial(walk, NOISES[noise], steps)
    limits, keys = (
        jnp.array(list(METHODS.values())),
        jax.random.split(jax.random.key(0), seeds),
    )
    walks = jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))(limits, keys)
    return [
        tail_of(noise, method, *parts)
        for method, *parts in zip(METHODS, *map(np.asarray, walks))
    ]


def tail_of(
    noise: str,
    method: str,
    distances: np.ndarray,
    centres: np.ndarray,
    shares: np.ndarray,
) -> Tail:
    first = distances.shape[1] // 5
    settled = distances[:, first:]
    median = float(np.median(settled))
    return Tail(
        noise=noise,
        method=method,
        median=median,
        high=float(np.quantile(settled, 0.999)),
        largest=float(settled.max()),
        jumps=int((settled.max(axis=1) > 2 * median).sum()),
        clipped_share=float(shares.mean()),
        # All coordinates have one distribution, so their mean over everything tells
        # that of each.
        bias=math.sqrt(DIMENSIONS)
        * abs(float(centres[:, first:].mean(dtype=np.float64))),
        distances=settled,
    )


def clipped_sgd(step_size: Any, limit: Any) -> optax.GradientTransformation:
    return optax.chain(optaxclip.clip_by_global_norm(limit), optax.sgd(step_size))


def walk(
    noise: Callable[..., jax.Array], steps: int, limit: Any, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One run from the minimum: |x| and the mean coordinate of x at every step, and the
    share of steps clipped.
    """
    optimizer = clipped_sgd(STEP_SIZE, limit)

    def step(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        x, state = carry
        updates, state = optimizer.update(
            x + noise(key, x.shape), state
        )  # the gradient of |x|^2 / 2 is x
        x = jnp.asarray(optax.apply_updates(x, updates))
        return (x, state), (jnp.linalg.norm(x), x.mean())

    x = jnp.zeros(DIMENSIONS)
    (_, state), (distances, centres) = jax.lax.scan(
        step, (x, optimizer.init(x)), jax.random.split(key, steps)
    )
    return distances, centres, optaxclip.metrics(state)["clip/clipped_share"]


def compare_descents(starts: Sequence[float]) -> list[Descent]:
    """The best fixed step and the best clipped one for each start."""
    fixed_steps = np.geomspace(1e-6, 1e-1, 501)
    clipped_steps, limits = (
        axis.ravel()
        for axis in np.meshgrid(
            np.geomspace(1e-2, 1e2, 161), np.geomspace(1e-2, 1e2, 161)
        )
    )
    rows, pair = [], None
    for start in starts:
        fixed, at = fewest_steps(fixed_steps, None, start)
        clipped, best = fewest_steps(clipped_steps, limits, start)
        pair = pair or (clipped_steps[best], limits[best])
        size, limit = np.array(pair)[:, None]
        kept, _ = fewest_steps(size, limit, start)
        rows.append(
            Descent(
                start,
                fixed,
                fixed_steps[at],
                clipped,
                clipped_steps[best],
                limits[best],
                kept,
            )
        )
    return rows


def fewest_steps(
    step_sizes: np.ndarray, limits: np.ndarray | None, start: float
) -> tuple[int, int]:
    """(steps, place): with which of the settings all starts have arrived first, and
    after how many steps.
    """
    x = jnp.asarray(
        np.append(start * np.random.default_rng(0).uniform(size=LANES - 1), start),
        jnp.float32,
    )
    steps, arrived = _descend(
        jnp.asarray(step_sizes, jnp.float32),
        None if limits is None else jnp.asarray(limits, jnp.float32),
        x,
    )
    if not arrived.any():
        raise RuntimeError(
            f"No setting brought all starts up to {start} to |f'| <= {GRADIENT} within "
            f"{MOST_STEPS} steps."
        )
    # Several may arrive at once: the one in their middle is the least lucky.
    places = np.flatnonzero(arrived)
    return int(steps), int(places[len(places) // 2])


@jax.jit
def _descend(
    step_sizes: jax.Array, limits: jax.Array | None, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Descends on x^4 with all settings from all starts side by side, until the first
    setting has brought all of them there.
    """
    slope = jax.grad(lambda x: x**4)

    def init(step_size: jax.Array, limit: Any, x: jax.Array) -> Any:
        return x, clipped_sgd(step_size, limit).init(x), jnp.abs(slope(x)) <= GRADIENT

    def step(step_size: jax.Array, limit: Any, lane: Any) -> Any:
        x, state, arrived = lane
        updates, state = clipped_sgd(step_size, limit).update(slope(x), state)
        x = optax.apply_updates(x, updates)
        return x, state, arrived | (jnp.abs(slope(x)) <= GRADIENT)

    def on_all(function: Any) -> Any:
        """Over all settings, and for each over all starts."""
        return jax.vmap(
            jax.vmap(function, (None, None, 0)),
            (0, None if limits is None else 0, None if function is init else 0),
        )

    def go_on(carry: Any) -> jax.Array:
        count, (_, _, arrived) = carry
        return (count < MOST_STEPS) & ~arrived.all(axis=1).any()

    lanes = on_all(init)(step_sizes, limits, starts)
    count, (_, _, arrived) = jax.lax.while_loop(
        go_on,
        lambda carry: (carry[0] + 1, on_all(step)(step_sizes, limits, carry[1])),
        (jnp.int32(0), lanes),
    )
    return count, arrived.all(axis=1)


def growth(descents: list[Descent], field: str) -> float:
    """The power of the start that the steps grow with."""
    return float(
        np.polyfit(
            np.log([row.start for row in descents]),
            np.log([getattr(row, field) for row in descents]),
            1,
        )[0]
    )


def print_tails(tails: list[Tail], seeds: int, steps: int) -> None:
    print(
        f"f(x) = |x|^2 / 2, noise of variance 1 a coordinate. {seeds} runs of {steps} "
        "steps\n"
    )
    print(
        "noise    method       median |x|  99.9 %  largest  largest / median  runs "
        "with |x| > 2 medians  clipped    bias"
    )
    for row in tails:
        sizes = (
            f"{row.median:10.3f}  {row.high:6.3f}  {row.largest:7.3f}  "
            f"{row.largest / row.median:16.2f}"
        )
        print(
            f"{row.noise:7}  {row.method:11}  {sizes}  {row.jumps:22} of {seeds}  "
            f"{row.clipped_share:7.3%}  {row.bias:6.4f}"
        )


def print_descents(descents: list[Descent]) -> None:
    print(
        f"\nf(x) = x^4, the fewest steps until |f'| <= {GRADIENT:g} from every start "
        "up to x0\n"
    )
    print(
        "    x0    fixed  with step    clipped  with step, limit    fixed / clipped    "
        "clipped, first pair kept"
    )
    for row in descents:
        clipped = f"{row.clipped:7}  {row.clipped_step:9.3g}, {row.limit:5.3g}"
        print(
            f"{row.start:6g}  {row.fixed:7}  {row.fixed_step:9.3g}    {clipped}    "
            f"{row.fixed / row.clipped:15.0f}    {row.kept:24}"
        )
    if len(descents) > 1:
        powers = [
            f"x0^{growth(descents, field):.2f}"
            for field in ("fixed", "clipped", "kept")
        ]
        print(
            f"\nThey grow as {powers[0]} with a fixed step, {powers[1]} clipped, and "
            f"{powers[2]} clipped with the first pair kept."
        )


def draw(tails: list[Tail], descents: list[Descent], picture: str | Path) -> None:
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for row in tails:
        draw_tail(left, row)
    left.set(
        title="Rare large jumps",
        xlabel="|x| / its median",
        ylabel="share of steps with |x| beyond",
        yscale="log",
    )
    draw_descents(right, descents)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def draw_tail(axis: Any, row: Tail) -> None:
    ordered = np.sort(row.distances, axis=None)[::-1] / row.median
    ranks = np.unique(np.geomspace(1, ordered.size, 500).astype(int))
    axis.plot(
        ordered[ranks - 1],
        ranks / ordered.size,
        "--" if "clipped" in row.method else "-",
        color=COLOURS[row.noise],
        label=f"{row.noise}, {row.method}",
    )


def draw_descents(axis: Any, descents: list[Descent]) -> None:
    starts = [row.start for row in descents]
    for field, label, colour in (
        ("fixed", "best fixed step", "#d55e00"),
        ("kept", "clipped, tuned for the first start", "#56b4e9"),
        ("clipped", "clipped, tuned for each", "#0072b2"),
    ):
        axis.loglog(
            starts,
            [getattr(row, field) for row in descents],
            "o-",
            color=colour,
            label=label,
        )
    axis.set(
        title="Steps to the bottom of x^4",
        xlabel="farthest start",
        ylabel="steps until |f'| <= 0.01",
    )
    axis.set_xticks(starts, [f"{start:g}" for start in starts])
    axis.minorticks_off()


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=32,
        help="how many runs of each (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=15_000,
        help="how many steps to train (default: %(default)s)",
    )
    parser.add_argument(
        "--starts",
        type=float,
        nargs="+",
        default=(10.0, 20.0, 40.0, 80.0),
        metavar="DISTANCE",
        help="the distances from the minimum to start from (default: %(default)s)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="PATH",
        help="draw a picture to this path (default: no picture)",
    )
    return parser


if __name__ == "__main__":
    main(**vars(command_line().parse_args()))
