"""Formats of strings in a schema, as regular expressions."""

_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_PIECE = r"[0-9a-fA-F]{1,4}"
_TAIL = rf"({_PIECE}:{_PIECE}|{_IPV4})"
_IPV6 = "|".join(
    [
        rf"({_PIECE}:){{6}}{_TAIL}",
        rf"::({_PIECE}:){{5}}{_TAIL}",
        rf"({_PIECE})?::({_PIECE}:){{4}}{_TAIL}",
        rf"(({_PIECE}:){{0,1}}{_PIECE})?::({_PIECE}:){{3}}{_TAIL}",
        rf"(({_PIECE}:){{0,2}}{_PIECE})?::({_PIECE}:){{2}}{_TAIL}",
        rf"(({_PIECE}:){{0,3}}{_PIECE})?::{_PIECE}:{_TAIL}",
        rf"(({_PIECE}:){{0,4}}{_PIECE})?::{_TAIL}",
        rf"(({_PIECE}:){{0,5}}{_PIECE})?::{_PIECE}",
        rf"(({_PIECE}:){{0,6}}{_PIECE})?::",
    ]
)
_YEAR = r"(\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"  # not 0000
_FOURTHS = r"(0[48]|[2468][048]|[13579][26])"  # of a century, but for its first year
_LEAP = rf"(\d\d{_FOURTHS}|({_FOURTHS})00)"
_DAYS = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_DATE = rf"({_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,8}}"
_ATOM = r"[a-zA-Z0-9_+-]+"
_CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_CALENDAR = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
_WRITTEN = "-a-zA-Z0-9._~!$&'()*+,;=@"  # characters of a path, except the colon
_PATH = rf"(/[{_WRITTEN}:]*)*"
_ENDING = rf"(\?[{_WRITTEN}:/?]*)?(#[{_WRITTEN}:/?]*)?"  # query and fragment
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}://{_HOST}(:\d{{1,5}})?{_PATH}{_ENDING}"
_HEX = "[0-9a-fA-F]"
_BASE64 = "[A-Za-z0-9+/]"

ANY = {"binary", "directory-path", "file-path", "password", "path"}  # of any content, as OpenAPI and Pydantic name them
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P({_CALENDAR}({_CLOCK})?|{_CLOCK}|\d+W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL}){{1,4}}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": rf"{_URI}|(/|/?[{_WRITTEN}]+{_PATH})?{_ENDING}",
    "json-pointer": r"(/([^~/]|~[01])*)*",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "byte": rf"({_BASE64}{{4}})*({_BASE64}{{2}}==|{_BASE64}{{3}}=)?",
}
FORMATS |= {
    f"uuid{version}": rf"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
    for version in (1, 3, 4, 5, 6, 7, 8)
}
