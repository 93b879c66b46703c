"""Products of a few tokens with the weights of those experts that any of them goes to."""

from .api import active as active
from .api import multiply as multiply
from .api import serves as serves
