"""Tells from qualified names (`encoder.layers.0.attention`) which module contains which."""


def is_inside(name: str, module: str) -> bool:
    """Whether `name` is the module itself or a module (or parameter) inside of it."""
    return name == module or name.startswith(f"{module}.")


def enclosing_modules(name: str) -> list[str]:
    """The names of all modules that contain this one, the outermost first and the module itself last."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
