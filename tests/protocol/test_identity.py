"""Keys of connections, as the machines see them: which key may speak for which peer, revocation, keys of links."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zpccl.errors import AuthenticationFailed, Kicked
from zpccl.protocol import events
from zpccl.protocol.identity import SALT_BYTES, is_peer_id_of, make_peer_id
from zpccl.protocol.master import MasterMachine, MasterOptions
from zpccl.protocol.messages import (
    Hello,
    Kick,
    Leave,
    Neighbour,
    Neighbours,
    NeighboursChanged,
    Refusal,
    Refused,
    Welcome,
    decode_master_message,
    encode,
)
from zpccl.protocol.peer import State

from .harness import RUN_ID, PeerBench, logs, pid, sent, token
from .takeover import report_of

SEED = b"s" * 32


def id_of(name: str, identity: str) -> bytes:
    return make_peer_id(identity, pid(name)[:SALT_BYTES])


class Master:
    """A master whose connections have keys."""

    def __init__(self, link_seed: bytes = SEED) -> None:
        self.machine = MasterMachine(RUN_ID, options=MasterOptions(link_seed=link_seed))
        self.now_ns = 1_000
        self.log: list[str] = []

    def handle(self, event: events.MasterEvent) -> list[tuple[Any, Any]]:
        effects = self.machine.handle(event, self.now_ns)
        self.machine.validate()
        self.log += [line.text for line in logs(effects)]
        return sent(effects)

    def say(self, connection: str, identity: str, message: Any) -> list[tuple[Any, Any]]:
        return self.handle(events.PeerMessageReceived(connection, message, "", identity))

    def hello(self, name: str, on: str, identity: str, **changes: Any) -> list[tuple[Any, Any]]:
        fields = {"peer_id": id_of(name, identity), "token": token(name), "is_member": False, **changes}
        return self.say(on, identity, Hello(group=0, name=name, addresses=(f"{name}:1",), **fields))

    def register(self, name: str, identity: str) -> list[tuple[Any, Any]]:
        """Registers on a connection of the same name, once the master takes newcomers."""
        said = self.hello(name, name, identity)
        while id_of(name, identity) not in self.machine.registry.peers:
            deadline_ns = self.machine.deadline_ns()
            assert deadline_ns is not None
            self.now_ns = max(self.now_ns, deadline_ns)
            said += self.handle(events.Tick())
        return said


def to(connection: str, said: list[tuple[Any, Any]], kind: type) -> Any:
    """The last message of a kind that was sent on a connection, or None."""
    return next((m for c, m in reversed(said) if c == connection and isinstance(m, kind)), None)


def all_to(connection: str, said: list[tuple[Any, Any]], kind: type) -> list[Any]:
    """All messages of a kind that were sent on a connection."""
    return [message for c, message in said if c == connection and isinstance(message, kind)]


def neighbours_told(connection: str, said: list[tuple[Any, Any]]) -> tuple[Neighbour, ...]:
    """The neighbours that the peer of a connection was told, at once or later."""
    told = [n for message in all_to(connection, said, Neighbours) for n in message.neighbours]
    return tuple(told + [n for message in all_to(connection, said, NeighboursChanged) for n in message.joined])


def test_ids_tell_whose_they_are() -> None:
    one, other = id_of("a", "key of a"), id_of("b", "key of a")
    assert one != other and len(one) == 16
    assert is_peer_id_of(one, "key of a") and is_peer_id_of(other, "key of a")
    assert not is_peer_id_of(one, "key of b") and not is_peer_id_of(bytes(16), "key of a")
    assert not is_peer_id_of(one[:8] + other[8:], "key of a")
    assert is_peer_id_of(bytes(16), "")


def test_an_id_belongs_to_the_key_that_registered_it() -> None:
    """S7: even an attacker that knows the token of a session cannot take it over with another key."""
    master = Master()
    master.register("a", "key of a")
    a = id_of("a", "key of a")
    promise = master.machine._leader.promise
    of_run = {"is_member": True, "run_id": RUN_ID, "promised": promise.term, "leader": promise.leader}
    for is_member in (True, False):
        for _ in range(3):
            said = master.hello("a", "elsewhere", "key of b", peer_id=a, is_member=is_member, connection=5)
            assert to("elsewhere", said, Refused).refusal is Refusal.MALFORMED
            assert to("elsewhere", said, Welcome) is None
    assert master.machine.registry.peers[a].connection == "a"
    assert sum("belongs to another key" in line for line in master.log) == 1, "said once, and not for each message"
    assert to("again", master.hello("a", "again", "key of a", connection=6, **of_run), Welcome) is not None


def test_a_connection_with_another_key_does_not_speak_for_a_peer() -> None:
    """S7: libzmq lets clients choose their routing id, so the same id may return with another key behind it."""
    master = Master()
    master.register("a", "key of a")
    a, b = id_of("a", "key of a"), id_of("b", "key of b")
    for message in (Leave(), Hello(a, token("a"), True, 0, "a", ()), Hello(b, token("b"), False, 0, "b", ())):
        said = master.say("a", "key of b", message)
        assert to("a", said, Refused).refusal is Refusal.MALFORMED
    assert list(master.machine.registry.peers) == [a]
    master.say("a", "key of a", Leave())
    assert not master.machine.registry.peers


def test_a_report_belongs_to_the_key_of_its_peer() -> None:
    """S7: otherwise an attacker that knows an id could report first, and be that peer at a new master."""
    master = Master()
    master.machine.recover(master.now_ns)
    hello = Hello(id_of("a", "key of a"), token("a"), True, 0, "a", ("a:1",), 1, RUN_ID)
    assert master.machine.candidate is not None
    promise = master.machine.candidate.promise
    report = report_of("a", hello=replace(hello, promised=promise.term, leader=promise.leader))
    assert to("elsewhere", master.say("elsewhere", "key of b", report), Refused).refusal is Refusal.MALFORMED
    assert to("a", master.say("a", "key of a", report), Refused) is None


def test_peers_with_a_revoked_key_are_removed_and_the_others_told() -> None:
    master = Master()
    ids = {}
    for name, identity in [("a", "one"), ("b", "two"), ("c", "two"), ("d", "three")]:
        master.register(name, identity)
        ids[name] = id_of(name, identity)
    said = master.handle(events.KeysRevoked({"two": "bob", "four": "nobody"}))
    assert set(master.machine.registry.peers) == {ids["a"], ids["d"]}
    for name in "bc":
        kick = to(name, said, Kick)
        assert "bob" in kick.reason and "no longer allowed" in kick.reason
    for name in "ad":
        assert to(name, said, Kick) is None
        gone = {peer_id for message in all_to(name, said, NeighboursChanged) for peer_id in message.gone}
        assert gone == {ids["b"], ids["c"]}


def test_each_pair_has_a_key_that_no_third_knows() -> None:
    master = Master()
    said = [message for name in "abc" for message in master.register(name, "same")]
    keys = {
        (name, neighbour.peer_id): neighbour.link_key for name in "abc" for neighbour in neighbours_told(name, said)
    }
    assert all(len(key) == 32 for key in keys.values())
    assert keys["a", id_of("b", "same")] == keys["b", id_of("a", "same")]
    assert len(set(keys.values())) == 3
    again = Master()
    more = [message for name in "abc" for message in again.register(name, "same")]
    assert neighbours_told("a", more) == neighbours_told("a", said), "a restarted master gives the same keys"
    other = Master(b"t" * 32)
    others = [message for name in "abc" for message in other.register(name, "same")]
    theirs = {n.link_key for n in neighbours_told("a", others)}
    assert theirs.isdisjoint(keys.values())


def test_without_a_secret_links_have_no_keys() -> None:
    master = Master(b"")
    said = master.register("a", "") + master.register("b", "")
    assert [n.link_key for n in neighbours_told("a", said)] == [b""]


def test_keys_of_links_do_not_show() -> None:
    neighbour = Neighbour(pid("a"), "a", ("a:1",), True, b"K" * 32)
    message = Neighbours((neighbour,))
    assert decode_master_message(encode(message)) == message
    assert "KKKK" not in repr(message) and "a:1" in repr(message)
    assert "KKKK" not in repr(MasterOptions(link_seed=b"K" * 32))


def test_a_refused_newcomer_is_told_why_at_once() -> None:
    bench = PeerBench()
    bench.handle(events.ConnectCalled(0, attempts=5))
    effects = bench.handle(events.AuthenticationRefused("its secret or key differs"))
    error = bench.error(effects)
    assert isinstance(error, AuthenticationFailed) and "its secret or key differs" in str(error) and error.address
    assert bench.machine.state is State.CLOSED


@pytest.mark.parametrize("state", ["pending", "member"])
def test_a_peer_of_the_run_is_not_ended_by_a_refusal(state: str) -> None:
    """A refusal comes before anything is authenticated, so anybody on the path can forge it."""
    bench = getattr(PeerBench(), state)()
    bench.down()
    assert bench.handle(events.AuthenticationRefused("it does not allow this key")) == []
    assert bench.machine.state is not State.CLOSED
    assert any("does not allow this key" in line.text for line in bench.logged)
    assert bench.up(), "it says hello again"


def test_a_removed_peer_is_told() -> None:
    bench = PeerBench().member()
    effects = bench.hear(Kick(6, "its key, bob, is no longer allowed"))
    assert isinstance(bench.machine.error, Kicked) and "bob" in str(bench.machine.error)
    assert bench.machine.state is State.CLOSED and effects is not None


def test_only_neighbours_get_links() -> None:
    bench = PeerBench().pending()
    bench.hear(Neighbours((Neighbour(pid("b"), "b", (), False),)))
    assert bench.machine.wants_link(pid("b")) and not bench.machine.wants_link(pid("c"))
    bench.hear(Neighbours(()))
    assert not bench.machine.wants_link(pid("b"))
