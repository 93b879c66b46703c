"""Attention of many blocks of one sequence to a shared context, with gradients: the attention of training."""

from .api import attend_anchored as attend_anchored
