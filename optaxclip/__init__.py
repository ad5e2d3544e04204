from ._core._kernel import clip_by
from ._clippers._by_norm import *
from ._clippers._agc import adaptive_grad_clip
from ._norms._norms import *
from ._core._factors import rescale
from . import rules, shrinks

__version__ = "0.1.0"
