"""How a number of things is said."""


def counted(count: int, noun: str) -> str:
    """A number and what it counts, as in "1 run" and "1,200 runs"; the noun takes an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
