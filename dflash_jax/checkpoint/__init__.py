"""Safetensors on disk <-> parameters in device memory, by a declarative table."""

from .hub import read_json as read_json
from .hub import resolve as resolve
from .reader import Reader as Reader
from .reader import flat as flat
from .reader import load as load
from .reader import nested as nested
from .reader import save as save
from .table import BlockScaled as BlockScaled
from .table import Leaf as Leaf
from .table import Merged as Merged
from .table import Packed as Packed
from .table import Part as Part
from .table import QuantisedLeaf as QuantisedLeaf
from .table import Section as Section
from .table import Source as Source
from .table import Stored as Stored
from .table import Table as Table
from .table import copied as copied
from .table import fused as fused
from .table import fused_each as fused_each
from .table import leaves as leaves
from .table import stacked as stacked
