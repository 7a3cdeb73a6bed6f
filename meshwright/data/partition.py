"""Which part of a global batch a rank takes, and how that part is cut into microbatches."""


def share(count: int, rank: int, ranks: int) -> range:
    """A rank's positions: contiguous, sizes differ by at most one, and rank 0 never goes without."""
    each, extra = divmod(count, ranks)
    start = rank * each + min(rank, extra)
    return range(start, start + each + (rank < extra))


def microbatches(positions: range, accumulation: int) -> list[range]:
    """Cuts into at most `accumulation` pieces of nearly equal size, none of them empty."""
    pieces = min(accumulation, len(positions))
    cuts = [share(len(positions), piece, pieces) for piece in range(pieces)]
    return [positions[cut.start : cut.stop] for cut in cuts]


def parts(count: int, rank: int, ranks: int, accumulation: int) -> list[range]:
    """A rank's microbatches of a batch of `count`: on every rank as many as rank 0 has.

    Sharded models talk to each other in every forward pass, so a rank with fewer would leave the others
    waiting. Its missing ones are empty ranges at the end, for which the loader borrows a sample.
    """
    own = microbatches(share(count, rank, ranks), accumulation)
    everyone = len(microbatches(share(count, 0, ranks), accumulation))
    return own + [range(0)] * (everyone - len(own))
