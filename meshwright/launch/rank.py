"""What a rank does around its work: logs to its own file, joins the others, and tells why it failed."""

from collections.abc import Callable

import torch

from meshwright.launch import environment
from meshwright.launch.ending import die_with_agent, fail
from meshwright.launch.output import redirect
from meshwright.launch.place import Place
from meshwright.launch.timeouts import explain
from meshwright.launch.world import World, join, leave


def run_rank(
    main: Callable[[World, Place], None],
    device: str,
    timeout_s: float,
    join: Callable[[str, float], World] = join,
) -> None:
    """Runs `main` as the rank the environment tells of. In a rank a failure is recorded and ends the process;
    in a world of one, which nobody launched, it is raised. `join`: how it meets the others."""
    here = environment.read()
    if not here.launched:
        main(join(device, timeout_s), Place.nowhere())
        return
    die_with_agent(here)
    if here.folder is not None:
        redirect(here.folder, here.rank, here.attempt, here.speaker)
        place = Place.in_folder(here.folder, here.rank, here.attempt)
    else:
        place = Place.nowhere(here.attempt)
    world = World(here.rank, here.local_rank, here.size, here.local_size, here.attempt, torch.device("cpu"), None)
    try:
        world = join(device, timeout_s)
        main(world, place)
        leave()
    except SystemExit:
        raise
    except BaseException as error:
        told = explain(error, world, place, timeout_s, place.folder)
        if told is not None and told is not error:
            told.__cause__ = error
        fail(told or error, here, place)
