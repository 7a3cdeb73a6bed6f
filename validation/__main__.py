"""`python -m validation [--all] [--json]`: predicts published training runs and prints how far off each source is."""

import argparse
import json
import sys

from validation.predictions.report import as_json, lines, report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m validation", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every published row, ten minutes of a core")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    scores = report(options.all, progress=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(as_json(scores)) if options.json else "\n".join(lines(scores)), flush=True)


if __name__ == "__main__":
    main()
