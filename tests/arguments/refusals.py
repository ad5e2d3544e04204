"""A tree, and how a refusal is held against its words."""

import re

import jax.numpy as jnp
import pytest

TREE = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def refused(error, text, call):
    with pytest.raises(error, match=re.escape(text)):
        call()
