"""The memory of a device: telling that a computation did not fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device had too little memory; JAX has no type of its own for that."""
    return str(error).startswith("RESOURCE_EXHAUSTED")
