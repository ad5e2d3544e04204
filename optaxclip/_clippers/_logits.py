"""Which of the attention logits that `qk_clip` is given belong to which attention."""

from typing import Any

import jax
import jax.numpy as jnp

from ._heads import Attention, common, names_in


def logits_of(attentions: list[Attention], max_logits: Any) -> dict[str, Any]:
    """The logits of each attention: the one array whose path begins like its own, or
    the other way round.

    Raises:
      ValueError: an attention without logits, with several, or with those of another
        shape.
    """
    flat = jax.tree_util.tree_flatten_with_path(max_logits)[0]
    entries = [(names_in(path), value) for path, value in flat]
    found = {}
    for attention in attentions:
        # flax's `sow` adds a name after the path, and users may leave out its end.
        own = [
            value for path, value in entries if _overlap(path, attention.path)
        ]
        if len(own) != 1 or len(entries) != len(attentions):
            shown = ", ".join(repr("/".join(path)) for path, _ in entries)
            raise ValueError(
                f"qk_clip: max_logits must have one array for each of "
                f"{[each.name for each in attentions]}, got {shown or 'none'}."
            )
        found[attention.name] = _check_logits(attention, own[0])
    return found


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return common(one, other) in (one, other)


def _check_logits(attention: Attention, value: Any) -> Any:
    shape, wanted = jnp.shape(value), attention.shape
    alike = len(shape) == len(wanted) and shape[:-1] == wanted[:-1]
    if not alike or shape[-1] % wanted[-1]:
        raise ValueError(
            f"qk_clip: max_logits of the attention {attention.name!r} must have the "
            f"shape {wanted}, or a multiple of its last number where several queries "
            f"share a key, got {shape}: take the maximum over batch and positions. "
            "Where an axis of the weights counts layers, name it too: "
            "Heads((layer axis, head axis))."
        )
    return value
