"""How modules lie in each other, by their names."""


def within(name: str, module: str) -> bool:
    """Whether it is the module, or one inside of it."""
    return name == module or name.startswith(f"{module}.")


def enclosing(name: str) -> list[str]:
    """The module, and all that it lies in, from the outermost on."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
