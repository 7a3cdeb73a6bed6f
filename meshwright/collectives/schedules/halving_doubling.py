"""Recursive halving and doubling, an all-reduce of n ranks. In the rounds of halving, partners at distance 1, 2, ...
n/2 exchange half of the chunks that they still sum. In the rounds of doubling they gather the summed chunks in the
reverse order. It sends as few bytes as the ring, in 2 log2(n) rounds; most of the bytes go to near ranks.

If n is not a power of two, let p be the largest power of two below n. Each of the first n - p odd ranks sends its whole
tensor to the even rank before it, is idle while the p other ranks halve and double, and receives the result at the end.
This costs two more rounds of the whole tensor.
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
    """Returns the ranks in bit-reversed order, in which partners that are half the list apart are neighboring ranks.
    With this order each rank keeps one contiguous part of the tensor, and the first exchanges, which are the largest,
    are between near ranks."""
    if len(ranks) <= 1:
        return ranks
    return _near_first(ranks[::2]) + _near_first(ranks[1::2])


def _exchange(active: list[int], distance: int, operation: Operation) -> Round:
    """Returns the round in which ranks at indices of `active` that are `distance` apart exchange chunks. The rank at
    index i works on the aligned block of `2 * distance` chunks that contains chunk i. When halving ("add"), it sends
    the half of the block that contains its partner's index; when doubling ("copy"), the half that contains its own."""
    sends = []
    for index, rank in enumerate(active):
        partner = index ^ distance
        begin = (partner if operation == "add" else index) // distance * distance
        sends += [Send(rank, active[partner], chunk, operation) for chunk in range(begin, begin + distance)]
    return tuple(sends)
