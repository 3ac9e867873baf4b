"""All ranks of a job begin at one place, whatever each one's sidecar knows.

A sidecar that lives goes on from its memory; one that was lost with its pod or machine comes back at the newest
snapshot. Ranks that each believed their own would train on packs of different steps, and nobody would notice.

Through the store of torch.distributed's default group, not by a collective: whatever else the trainer has its ranks
do before their first pack, the two do not get in each other's way, and no device is needed.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import distributed_c10d

from bagelplane.errors import ProtocolError

_SHOWN_RANKS = 8


def lowest_of_all(place: int, *, rank: int, world_size: int, timeout_seconds: float) -> int:
    """The lowest of all ranks' places. Returns when every rank has told its own, at its n-th call the n-th one.

    Raises ProtocolError, naming the ranks that are missing at the deadline.
    """
    # torch has no public name for it; it is what all its own bookkeeping of groups goes through.
    store = distributed_c10d._get_default_store()
    # Counted in the store, which is another one after every restart: so ranks that were restarted count alike.
    call = store.add(f"bagelplane/calls/{rank}", 1)
    keys = [f"bagelplane/{call}/place/{other}" for other in range(world_size)]
    store.set(keys[rank], str(place))
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise ProtocolError("the ranks' agreement on a place was cut off", got=str(error)) from None
        shown = ", ".join(missing[:_SHOWN_RANKS]) + (", ..." if len(missing) > _SHOWN_RANKS else "")
        raise ProtocolError(
            f"waited {timeout_seconds:g} s for all {world_size} ranks to say where they stand",
            got=f"nothing from rank {shown}",
            fix="take the first pack on every rank, and load a state on all of them or on none",
        ) from None
    return min(int(told) for told in store.multi_get(keys))
