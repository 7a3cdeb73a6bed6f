"""`python -m validation [--all] [--json]` predicts published training runs, prints the errors of each source, and
writes them with an explanation to `validation/report.md` (with `--all` to `validation/report_all.md`)."""

import argparse
import json
import sys

from validation.predictions.report import as_json, make_report
from validation.predictions.report_text import EVERY_ROW_FILE, SHORT_RUN_FILE, markdown, table_lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m validation", description=__doc__)
    parser.add_argument("--all", action="store_true", help="predict every published row: ten minutes of one core")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line instead of a table")
    options = parser.parse_args()
    report = as_json(make_report(options.all, progress=lambda line: print(line, file=sys.stderr, flush=True)))
    file = EVERY_ROW_FILE if options.all else SHORT_RUN_FILE
    file.write_text(markdown(report, options.all))
    print(json.dumps(report) if options.json else "\n".join(table_lines(report)), flush=True)
    print(f"written: validation/{file.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
