"""Attention of a few block positions to a long ragged cache and to the block itself."""

from .api import Visibility as Visibility
from .api import attend as attend
from .api import together as together
from .mosaic_gpu import Joined as Joined
from .reference import expand as expand
