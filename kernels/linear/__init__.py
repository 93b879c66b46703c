"""Products of rows with a weight, plain or quantized."""

from .api import dense as dense
from .api import linear as linear
