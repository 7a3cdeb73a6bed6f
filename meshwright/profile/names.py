"""How modules lie in each other, by their names."""


def within(name: str, module: str) -> bool:
    """Whether it is the module, or one inside of it."""
    return name == module or name.startswith(f"{module}.")
