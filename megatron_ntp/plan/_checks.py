"""The integer check shared by everything in the plan layer."""

from megatron_ntp.errors import PlanError, PlanTypeError


def require_int(
    name: str, value: object, minimum: int = 0, error: type[PlanError] = PlanTypeError
) -> int:
    """Return `value` if it is an int of at least `minimum`. A bool is not an int here."""
    if type(value) is not int:
        raise error(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < minimum:
        raise error(f"{name} must be at least {minimum}, got {value}")
    return value
