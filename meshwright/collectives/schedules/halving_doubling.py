"""Recursive halving and doubling: partners at distance 1, 2, ... n/2 exchange half of what they still hold, then the
same way back. As few bytes as the ring in 2 log2(n) rounds; most of them go to near ranks, a small share to far ones.

Where n is no power of two, the surplus is folded in: with p the power of two below n, each of the first n - p odd ranks
first gives its whole tensor to the even rank before it, rests, and is given the result at the end. The even ranks of
those pairs and all ranks behind them are the p that halve and double. So folding costs two more rounds, of the whole
tensor.
"""

from meshwright.collectives.schedules.schedule import Operation, Round, Schedule, Send


def halving_doubling(ranks: int) -> Schedule:
    power = 1 << (ranks.bit_length() - 1)
    folded = [(2 * pair + 1, 2 * pair) for pair in range(ranks - power)]
    resting = {rank for rank, _ in folded}
    active = _near_first([rank for rank in range(ranks) if rank not in resting])
    distances = [power >> step for step in range(1, power.bit_length())]
    rounds: list[Round] = [_exchange(active, distance, "add") for distance in distances]
    rounds += [_exchange(active, distance, "copy") for distance in reversed(distances)]
    if folded:
        rounds.insert(0, tuple(Send(rank, host, c, "add") for rank, host in folded for c in range(power)))
        rounds.append(tuple(Send(host, rank, c, "copy") for rank, host in folded for c in range(power)))
    return Schedule("halving-doubling", ranks, power, tuple(rounds))


def _near_first(ranks: list[int]) -> list[int]:
    """In the order of reversed bits: the first partners, half of the list apart, are neighbors. So each rank keeps one
    contiguous part of the tensor, and yet the first and largest exchanges are the near ones."""
    if len(ranks) <= 1:
        return ranks
    return _near_first(ranks[::2]) + _near_first(ranks[1::2])


def _exchange(active: list[int], distance: int, operation: Operation) -> Round:
    """The rank at place i works on the block of `2 * distance` chunks around i. Halving, it gives its partner the half
    in which the partner's place lies; doubling, it gives the half in which its own place lies."""
    sends = []
    for place, rank in enumerate(active):
        partner = place ^ distance
        begin = (partner if operation == "add" else place) // distance * distance
        sends += [Send(rank, active[partner], chunk, operation) for chunk in range(begin, begin + distance)]
    return tuple(sends)
