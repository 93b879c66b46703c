"""Products of rows with a weight, plain or quantised."""

from .api import dense as dense
from .api import linear as linear
