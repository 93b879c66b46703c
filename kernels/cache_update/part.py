"""A block that lies inside a larger array.

Shapes: B block rows, K key-value heads, T block positions, H head dim.
"""

from flax import struct
from jaxtyping import Array, Num


class Part(struct.PyTreeNode):
    """A block that is a part of a larger array, from which a kernel may read it.

    Attributes:
        block: the same numbers by themselves.
        source: the array.
        first, every: its row with the first position of the first head, and rows from there to that of the next head.
    """

    block: Num[Array, "B K T H"]
    source: Num[Array, "B _ H"]
    first: int = struct.field(pytree_node=False)
    every: int = struct.field(pytree_node=False)
