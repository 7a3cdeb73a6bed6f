"""Writes the generated files and parts of files of `docs/`: `python -m documentation`. With `--check` it writes
nothing, names the files that are not as they would be written, and exits with 1 if there are any."""

import sys
from pathlib import Path

from documentation.generated import generated_files, stale_files
from documentation.parts import pages_with_parts, stale_parts

DOCS = Path(__file__).parents[1] / "docs"


def main() -> int:
    if "--check" in sys.argv[1:]:
        for name in (stale := [*stale_files(DOCS, generated_files()), *stale_parts(DOCS)]):
            print(f"docs/{name} is not fresh: run python -m documentation")
        return int(bool(stale))
    for name, text in {**generated_files(), **pages_with_parts(DOCS)}.items():
        file = DOCS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
