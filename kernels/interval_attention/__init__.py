"""Attention of many queries to two intervals of keys each, with gradients: what whole rows are attended with."""

from .api import ROUNDED as ROUNDED
from .api import attend as attend
