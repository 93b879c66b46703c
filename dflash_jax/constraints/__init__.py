"""Constraints on answers: regular expressions, choices, JSON schemas and tool calls, as automata that read tokens."""

from dflash_jax.constraints.constraint import Constraint as Constraint
from dflash_jax.constraints.constraint import choice as choice
from dflash_jax.constraints.constraint import json_object as json_object
from dflash_jax.constraints.constraint import json_schema as json_schema
from dflash_jax.constraints.constraint import regex as regex
from dflash_jax.constraints.constraint import tool_calls as tool_calls
from dflash_jax.constraints.errors import ConstraintError as ConstraintError
