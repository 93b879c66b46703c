"""Appends fresh keys and values to a cache, in place."""

from .api import append as append
from .api import room as room
from .part import Part as Part
