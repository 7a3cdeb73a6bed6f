"""One rank of a proof: `python -m meshwright.proof.record.rank FOLDER DEVICE`, started by `prove`."""

import sys
from pathlib import Path

from meshwright.launch.place import Place
from meshwright.launch.rank import run_rank
from meshwright.launch.world import World
from meshwright.proof.question import Question
from meshwright.proof.record import question_file as carry
from meshwright.proof.record.record import record

QUESTION = "question.pickle"


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    question = carry.read(folder / QUESTION)
    run_rank(lambda world, place: _record(question, world, folder, place), device, question.timeout_s)


def _record(question: Question, world: World, folder: Path, place: Place) -> None:
    record(question, world, folder, place)


if __name__ == "__main__":
    main()
