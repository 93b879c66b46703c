"""What is wrong with a constraint."""


class ConstraintError(ValueError):
    """A constraint that cannot be enforced; `code` is stable, the message says where and why.

    Codes: invalid_schema, unsupported_schema, invalid_regex, constraint_too_large, constraint_timeout, unsatisfiable,
    no_constraints.
    """

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code

    def __reduce__(self):  # it comes from another process
        return type(self), (self.code, str(self))
