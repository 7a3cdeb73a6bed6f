"""Recursive halving and doubling. Partners at distance 1, 2, ... n/2 exchange half of the chunks they still sum, and
then gather the chunks in the reverse order. It sends as few bytes as the ring, in 2 log2(n) rounds; most of them go to
near ranks, a small share to far ones.

Where n is not a power of two, let p be the power of two below n. Each of the first n - p odd ranks first sends its
whole tensor to the even rank before it, is idle, and receives the result at the end. The even ranks of those pairs and
all ranks after them are the p ranks that halve and double. This costs two more rounds of the whole tensor.
"""

from meshwright.collectives.schedules.schedule import Operation, Round, Schedule, Send


def halving_doubling(ranks: int) -> Schedule:
    power = 1 << (ranks.bit_length() - 1)
    folded_pairs = [(2 * pair + 1, 2 * pair) for pair in range(ranks - power)]
    idle = {rank for rank, _ in folded_pairs}
    active = _near_first([rank for rank in range(ranks) if rank not in idle])
    distances = [power >> step for step in range(1, power.bit_length())]
    rounds: list[Round] = [_exchange(active, distance, "add") for distance in distances]
    rounds += [_exchange(active, distance, "copy") for distance in reversed(distances)]
    if folded_pairs:
        rounds.insert(0, tuple(Send(rank, host, c, "add") for rank, host in folded_pairs for c in range(power)))
        rounds.append(tuple(Send(host, rank, c, "copy") for rank, host in folded_pairs for c in range(power)))
    return Schedule("halving-doubling", ranks, power, tuple(rounds))


def _near_first(ranks: list[int]) -> list[int]:
    """Returns the ranks in bit-reversed order, in which partners half the list apart are neighboring ranks. So each
    rank keeps one contiguous part of the tensor, and the first and largest exchanges are between near ranks."""
    if len(ranks) <= 1:
        return ranks
    return _near_first(ranks[::2]) + _near_first(ranks[1::2])


def _exchange(active: list[int], distance: int, operation: Operation) -> Round:
    """The rank at index i works on the aligned block of `2 * distance` chunks that contains i. When halving, it sends
    the half of the block that contains its partner's index; when doubling, the half that contains its own index."""
    sends = []
    for index, rank in enumerate(active):
        partner = index ^ distance
        begin = (partner if operation == "add" else index) // distance * distance
        sends += [Send(rank, active[partner], chunk, operation) for chunk in range(begin, begin + distance)]
    return tuple(sends)
