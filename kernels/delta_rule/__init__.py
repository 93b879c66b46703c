"""The gated delta rule: a recurrent state per head that forgets and corrects itself at every position."""

from .api import advance as advance
from .api import read_block as read_block
from .api import read_prompt as read_prompt
