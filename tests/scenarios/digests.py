"""The scripted world with a data plane that tells digests: an attempt runs once all participants have started it."""

from __future__ import annotations

from functools import partial

from zpccl.limits import MS
from zpccl.protocol import effects, events

from .world import Call, Peer, World

DATA_NS = 1 * MS
"""How long an attempt takes, and then how long a digest takes. Both are shorter than the way to the master."""


class TellingPeer(Peer):
    """A peer whose data plane tells digests."""

    world: TellingWorld

    def _perform(self, effect: effects.PeerEffect) -> None:
        if isinstance(effect, effects.EndReduce) and not effect.commit:
            start = self.world.attempts.get(effect.attempt_id, {}).get(self)
            others = start.how.order if start is not None and start.is_ahead else ()
            for other in self.world.peers:
                if other is not self and other.peer_id in others:
                    ended = events.AttemptEnded(self.peer_id, effect.attempt_id)
                    self.world.after(DATA_NS, partial(other.handle, ended))
        if not isinstance(effect, effects.StartReduce):
            return super()._perform(effect)
        self._call_of[effect.attempt_id] = effect.call_id
        self.running[effect.attempt_id] = self.world.bits(effect.how.order)
        started = self.world.attempts.setdefault(effect.attempt_id, {})
        started[self] = effect
        participants = [peer for peer in self.world.peers if peer.peer_id in effect.how.order]
        if all(peer in started and peer.is_alive for peer in participants):
            for peer in participants:
                assert isinstance(peer, TellingPeer)
                self.world.after(DATA_NS, partial(peer.tell, started[peer]))
        return None

    def tell(self, start: effects.StartReduce) -> None:
        """The result is there: the peer tells its digest, if the plan asks for it and the call was not withdrawn."""
        attempt_id = start.attempt_id
        if attempt_id not in self.running or not self.is_alive:
            return
        call, digest = self.machine.calls.get(start.call_id), self.running[attempt_id]
        has_told = start.tells_digest and call is not None and call.withdrawn is None
        for other in self.world.peers if has_told else ():
            if other is not self and other.peer_id in start.how.order:
                told = events.DigestReceived(self.peer_id, attempt_id, start.call_id, digest)
                self.world.after(DATA_NS, partial(other.handle, told))
        self.handle(events.ReduceDone(attempt_id, digest, has_told=has_told))


class TellingWorld(World):
    """A world of such peers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.attempts: dict[int, dict[Peer, effects.StartReduce]] = {}

    def peer(self, name: str, masters: tuple[str, ...], identity: str = "", group: int = 0) -> Peer:
        """A peer of this world."""
        peer = TellingPeer(self, name, masters, identity, group)
        self.peers.append(peer)
        return peer


def give_up(peer: Peer, call: Call) -> None:
    """The timeout of a call runs out."""
    peer.handle(events.CallWithdrawn(call.call_id, timed_out=True))
