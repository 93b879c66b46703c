"""Attention of a few block positions to a long ragged cache and to the block itself."""

from .api import Visible as Visible
from .api import attend as attend
