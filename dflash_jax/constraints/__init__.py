"""Constraints on answers: regular expressions, choices and JSON schemas, as automata that read tokens."""

from dflash_jax.constraints.constraint import Constraint as Constraint
from dflash_jax.constraints.constraint import choice as choice
from dflash_jax.constraints.constraint import json_object as json_object
from dflash_jax.constraints.constraint import json_schema as json_schema
from dflash_jax.constraints.constraint import regex as regex
from dflash_jax.constraints.errors import ConstraintError as ConstraintError
