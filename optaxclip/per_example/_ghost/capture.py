"""Runs the losses of a batch forward and backward. Captures what the gradients of its
examples are made of:

    inputs        the data that come into each site, a
    cotangents    the cotangents of its outputs, c

Outputs of sites (`Site.tapped`) have taps: a tap is a value whose cotangent is that of
the output.

A value in a scan has axes for its iterations in front, the outermost scan first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn, Var

from ..._devices.mesh_types import varying_as, varying_as_any_of
from ..._jaxpr import is_literal
from .._passes import written_to_memory
from .sites import Site, SplitProgram, ends_of_scan
from .values import bind


class Captured(NamedTuple):
    """The arrays of one site, [example, *iterations of scans, ...]."""

    inputs: list[Array]  # the data that came in
    cotangents: list[Array]  # of the outputs that are tapped


# By the indices of sites
CapturedOfSites = dict[int, Captured]
Taps = dict[int, list[Array]]


def at_sites(by_index: dict[int, Any], sites: Sequence[Site]) -> dict[int, Any]:
    """The captured arrays, or taps, of some sites."""
    return {site.site_index: by_index[site.site_index] for site in sites}


def capture(
    program: SplitProgram, params: list[Array], batch: list[Array]
) -> tuple[list[Array], CapturedOfSites]:
    """Runs the losses of a batch forward and backward.

    Returns:
      The outputs of the losses, and the captured arrays of each site.
    """
    size = batch[0].shape[0]
    taps: Taps = {}
    for site in program.sites:
        taps[site.site_index] = []
        for out_type in site.tapped_types:
            shape = size, *site.scan_lengths, *out_type.shape
            tap = jnp.zeros(shape, out_type.dtype)
            taps[site.site_index].append(varying_as(tap, out_type))
    # A tap that does not vary over the batch's mesh axes would get the psum of its
    # cotangents. So taps vary as the batch does.
    example_zeros = jnp.zeros(size, jnp.float32)
    example_zeros, taps = varying_as_any_of((example_zeros, taps), batch)

    def loss_of_one(example: list[Array], example_zero: Array, taps: Taps) -> Any:
        outputs, inputs = _run(program, [*params, *example], taps, example_zero)
        value, *aux = outputs
        return value, (aux, inputs)

    losses = partial(jax.vmap(loss_of_one), batch, example_zeros)
    values, backward, (aux, inputs) = jax.vjp(losses, taps, has_aux=True)
    # Each tap belongs to one example, so that one pass gives all cotangents.
    (cotangents,) = backward(jnp.ones_like(values))
    inputs, cotangents = written_to_memory((inputs, cotangents))
    captured = {}
    for site_index, inputs_of_site in inputs.items():
        captured[site_index] = Captured(inputs_of_site, cotangents[site_index])
    return [values, *aux], captured


def _run(
    program: SplitProgram, args: Sequence[Any], taps: Taps, example_zero: Array
) -> tuple[list[Any], dict[int, list[Any]]]:
    """Runs a program, with its taps at the outputs of its sites.

    Args:
      program: the program.
      args: its inputs.
      taps: by the indices of sites.
      example_zero: float32[], 0 in each example. A value plus this zero is data.

    Returns:
      The outputs, and by the indices of sites the data that came in.
    """
    values: dict[Var, Any] = {}

    def write(variables: Sequence[Var], arrays: Sequence[Any]) -> None:
        values.update(zip(variables, arrays))

    def read(atoms: Sequence[Any]) -> list[Any]:
        arrays = []
        for atom in atoms:
            if is_literal(atom):
                arrays.append(atom.val)
            else:
                arrays.append(values[atom])
        return arrays

    write(program.jaxpr.constvars, program.consts)
    write(program.jaxpr.invars, args)
    inputs_of_sites: dict[int, list[Any]] = {}
    for eqn, site, body in program.steps:
        inputs = read(eqn.invars)
        if body is None:
            outputs = bind(eqn, inputs)
        else:
            run_body = _runner_of_body(eqn, body)
            taps_of_body = at_sites(taps, body.sites)
            outputs, inputs_of_body = run_body(inputs, taps_of_body, example_zero)
            inputs_of_sites |= inputs_of_body
        if site:
            for index, tap in zip(site.tapped, taps[site.site_index]):
                # An output that is the same for all examples would have one cotangent
                # for all of them.
                output = outputs[index] + example_zero.astype(outputs[index].dtype)
                outputs[index] = _tapped(output, tap)
            inputs_of_sites[site.site_index] = []
            for input_index, array in enumerate(inputs):
                if input_index not in site.operands:
                    inputs_of_sites[site.site_index].append(array)
        write(eqn.outvars, outputs)
    return read(program.jaxpr.outvars), inputs_of_sites


@jax.custom_vjp
def _tapped(output: Array, tap: Array) -> Array:
    """The output, whose cotangent also goes to the tap.

    A sum with the tap would do, but the zeros that it adds would be held in memory.
    """
    return output


_tapped.defvjp(
    lambda output, tap: (output, None), lambda _, cotangent: (cotangent, cotangent)
)


def _runner_of_body(eqn: JaxprEqn, body: SplitProgram) -> Callable[..., Any]:
    """`_run` of the body of a call or scan, as a function of inputs, taps and
    example_zero.
    """
    run = partial(_run, body)
    params = eqn.params
    if eqn.primitive.name in ("checkpoint", "remat2"):
        return jax.checkpoint(
            run, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
    if eqn.primitive.name != "scan":
        return run
    consts_end, carry_end = ends_of_scan(eqn)
    carry_count = carry_end - consts_end

    def scan(inputs: list[Any], taps: Taps, example_zero: Array) -> Any:
        consts = inputs[:consts_end]

        def run_iteration(carry: list[Any], slices_and_taps: Any) -> tuple[Any, Any]:
            slices, taps_of_iteration = slices_and_taps
            args = [*consts, *carry, *slices]
            outputs, inputs_of_sites = run(args, taps_of_iteration, example_zero)
            new_carry = outputs[:carry_count]
            return new_carry, (outputs[carry_count:], inputs_of_sites)

        # With the options of the loss, so that the loop runs as it asks for.
        carry, (outputs, inputs_of_sites) = lax.scan(
            run_iteration,
            inputs[consts_end:carry_end],
            (inputs[carry_end:], taps),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *outputs], inputs_of_sites

    return scan
