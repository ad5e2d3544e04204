"""Runs the losses of a batch forward and backward, and captures at each site the data
that come in, and the cotangents of its outputs.

The gradient of an example follows from these. Each output of a site has a tap: a value
whose cotangent is that of the output.

A value in a scan has axes for its turns in front, the outermost scan first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._mesh_types import varying_as, varying_as_any_of
from .._passes import written
from ._sites import Program, bind, ends_of_scan

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


class Captured(NamedTuple):
    """The arrays of one site, [example, *turns of scans, ...]."""

    inputs: list[Array]  # the data that came in
    cotangents: list[Array]  # of the outputs that are tapped


# By the numbers of sites
CapturedOfSites = dict[int, Captured]


def capture(
    program: Program, params: list[Array], batch: list[Array]
) -> tuple[list[Array], CapturedOfSites]:
    """Runs the losses of a batch forward and backward.

    Returns:
      The outputs of the losses, and what is captured at each site.
    """
    size = batch[0].shape[0]
    taps: dict[int, list[Array]] = {}
    for site in program.sites:
        taps[site.number] = []
        for index in site.tapped:
            out_type = site.out_types[index]
            # [example, *turns, ...]: stands for an output, to get its cotangent.
            shape = size, *site.scan_lengths, *out_type.shape
            tap = jnp.zeros(shape, out_type.dtype)
            taps[site.number].append(varying_as(tap, out_type))
    # In shard_map cotangents of another type would be summed over devices.
    zeros, taps = varying_as_any_of((jnp.zeros(size, jnp.float32), taps), batch)

    def of_one(example: Any, zero: Array, taps: Any) -> Any:
        (value, *aux), inputs = _run(program, [*params, *example], taps, zero)
        return value, (aux, inputs)

    of_all = partial(jax.vmap(of_one), batch, zeros)
    values, pull, (aux, inputs) = jax.vjp(of_all, taps, has_aux=True)
    # Each tap belongs to one example, so that one pass gives all cotangents.
    (cotangents,) = pull(jnp.ones_like(values))
    inputs, cotangents = written((inputs, cotangents))
    captured = {}
    for number, data in inputs.items():
        captured[number] = Captured(data, cotangents[number])
    return [values, *aux], captured


def _run(
    program: Program, args: Sequence[Any], taps: dict[int, list[Array]], zero: Array
) -> tuple[list[Any], dict[int, list[Any]]]:
    """Runs a program, with a tap at each output of a site that has one.

    Args:
      program: the program.
      args: its inputs.
      taps: by the numbers of sites.
      zero: float32[], 0 in each example, so that what is added to it is data.

    Returns:
      The outputs, and by the numbers of sites the data that came in.
    """
    # By identity, as in `_split`.
    values: dict[int, Any] = {}

    def write(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        for var, array in zip(variables, arrays):
            values[id(var)] = array

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [values.get(id(atom), getattr(atom, "val", None)) for atom in atoms]

    write(program.jaxpr.constvars, program.consts)
    write(program.jaxpr.invars, args)
    data_of_sites: dict[int, list[Any]] = {}
    for eqn, invars, outvars, site, body in program.steps:
        inputs = read(invars)
        if eqn and body:
            taps_of_body = {inner.number: taps[inner.number] for inner in body.sites}
            outputs, data_of_body = _body_runner(eqn, body)(inputs, taps_of_body, zero)
            data_of_sites |= data_of_body
        else:
            outputs = bind(eqn, inputs) if eqn else list(inputs)
        if site:
            for index, tap in zip(site.tapped, taps[site.number]):
                # What is the same for all examples would have one cotangent for all.
                output = outputs[index] + zero.astype(outputs[index].dtype)
                outputs[index] = _tapped(output, tap)
            data = [x for place, x in enumerate(inputs) if place not in site.operands]
            data_of_sites[site.number] = data
        write(outvars, outputs)
    return read(program.jaxpr.outvars), data_of_sites


@jax.custom_vjp
def _tapped(out: Array, tap: Array) -> Array:
    """The output, whose cotangent also goes to the tap.

    A sum with the tap would do, but the zeros that it adds would be held in memory.
    """
    return out


_tapped.defvjp(lambda out, tap: (out, None), lambda _, x: (x, x))


def _body_runner(eqn: JaxprEqn, body: Program) -> Callable[..., Any]:
    """`_run` of the body of a call or scan, as a function of inputs, taps and zero."""
    run = partial(_run, body)
    params = eqn.params
    if eqn.primitive.name in ("checkpoint", "remat2"):
        return jax.checkpoint(
            run, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
    if eqn.primitive.name != "scan":
        return run
    consts_end, carry_end = ends_of_scan(eqn)

    def loop(inputs: list[Any], taps: Any, zero: Array) -> Any:
        consts = inputs[:consts_end]

        def turn(carry: list[Any], xs: Any) -> tuple[Any, Any]:
            slices, taps_of_turn = xs
            outs, data = run([*consts, *carry, *slices], taps_of_turn, zero)
            carry_count = carry_end - consts_end
            return outs[:carry_count], (outs[carry_count:], data)

        # With the options of the loss, so that the loop runs as it asks for.
        carry, (ys, data) = lax.scan(
            turn,
            inputs[consts_end:carry_end],
            (inputs[carry_end:], taps),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys], data

    return loop
