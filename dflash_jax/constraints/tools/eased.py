"""What is left of a schema for tools that are not strict: keywords that can be enforced, and cheaply enough."""

from collections.abc import Mapping

from dflash_jax.constraints.characters import utf8
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expressions
from dflash_jax.constraints.keywords import KNOWN
from dflash_jax.constraints.patterns import regex
from dflash_jax.files import Fields, Json, Value

LONGEST = 256  # characters to which a length is enforced
FORMATS = {"date", "time", "date-time", "uuid", "ipv4"}  # those of small automata
_MAPS = "properties patternProperties $defs definitions".split()
_LISTS = "anyOf allOf prefixItems".split()


def eased(schema: Value) -> Value:
    """The schema without what cannot be enforced; it allows whatever the schema allows."""
    if not isinstance(schema, Mapping):
        return schema
    found: Json = {}
    for name, value in schema.items():
        if name == "oneOf" and "anyOf" not in schema and isinstance(value, list):
            found["anyOf"] = [eased(part) for part in value]
        elif name in _MAPS and isinstance(value, Mapping):
            found[name] = {key: eased(part) for key, part in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found[name] = [eased(part) for part in value]
        elif name in ("items", "additionalProperties"):
            found[name] = [eased(part) for part in value] if isinstance(value, list) else eased(value)
        elif _enforced(name, value, schema):
            found[name] = value
    return found


def _enforced(name: str, value: Value, schema: Fields) -> bool:
    """Whether a keyword can be enforced."""
    if name not in KNOWN or value is None or name in ("uniqueItems", "oneOf"):
        return False
    if name in ("minLength", "maxLength"):
        return isinstance(value, int) and value <= LONGEST
    if name == "format":
        return value in FORMATS
    if name in ("propertyNames", "minProperties", "maxProperties"):
        return not schema.get("properties")
    if name == "pattern":
        if "(?=" in str(value) or "(?!" in str(value):  # its automaton may be large, or match nothing
            return False
        try:
            regex(Expressions(), value, utf8, search=True)
        except (ConstraintError, TypeError, ValueError, RecursionError):
            return False
    return True
