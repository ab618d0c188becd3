"""`AffinityRouter`: the requests of a conversation go to one replica, which has their prefix in its KV cache and their experts in memory.

Rendezvous hashing (Thaler and Ravishankar 1998): each conversation ranks all replicas by a hash of both. So several ingresses agree without a word, and
where a replica comes or goes only its own conversations move. A replica that has `imbalance` more requests than the idlest one is passed over.

Ray copies this module into other processes instead of importing it there: what it shares with other modules has to be theirs.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .forwarding import Forwarded
from .report import add_router

__all__ = ["AffinityRouter", "rank"]


class AffinityRouter(RequestRouter):
    def initialize_state(self, imbalance: int = 4, **_: Any) -> None:
        """
        Args:
            imbalance: requests more than at the idlest replica, from which on that one is asked.
        """
        self._imbalance = imbalance
        add_router(self)

    async def choose_replicas(self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        """All of them, each a rank of its own: one that is full is passed over for the next."""
        loads = {replica.replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in candidate_replicas}
        by_load = sorted(candidate_replicas, key=lambda replica: loads[replica.replica_id])
        if pending_request is None:
            return [[replica] for replica in by_load]
        pending_request.routing_context.should_backoff = True  # where all are full
        request = next((argument for argument in pending_request.args if isinstance(argument, Forwarded)), None)
        if request is None or request.affinity is None:
            return [by_load]  # the idlest, as it turns out when they are asked
        ranked = sorted(candidate_replicas, key=lambda replica: rank(request.affinity or "", replica.replica_id.unique_id), reverse=True)
        if ranked and loads[ranked[0].replica_id] - loads[by_load[0].replica_id] >= self._imbalance:
            ranked = by_load
        return [[replica] for replica in ranked]


def rank(affinity: str, replica: str) -> bytes:
    """The replica with the highest one is a conversation's own."""
    return hashlib.blake2b(f"{affinity} {replica}".encode(), digest_size=8).digest()
