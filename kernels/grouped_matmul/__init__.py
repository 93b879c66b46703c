"""Products of rows with the weights of the group that each belongs to: the experts of a layer."""

from .api import grouped_matmul as grouped_matmul
