"""Messages and groups are noted while a generation lasts, and cost nothing after; counters of connections."""

from __future__ import annotations

import gc
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from picotron_ray.comm.link_counters import link_counters
from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.comm.sockets import SocketInfo
from tests.support.gloo.pool import Job, Pool


def exchange(job: Job, most: int) -> dict[str, Any]:
    """Messages of one generation: eight done, one that nobody sends to."""
    OPERATIONS.keep(most)
    plain = dict(vars(dist.ProcessGroup))
    groups = job.groups()
    groups.connect()
    with groups.forming():
        pair = dist.new_group([1, 0])
    OPERATIONS.serves(pair, "tp")
    peer = 1 - job.rank
    for _ in range(4):
        works = [dist.irecv(torch.empty(3), peer, tag=5), dist.isend(torch.ones(3), peer, tag=5)]
        for work in works:
            work.wait()
    del work, works
    gc.collect()
    waits = dist.irecv(torch.empty(2, 4, dtype=torch.int64), group=pair, group_src=peer)
    found = {"messages": OPERATIONS.messages(), "groups": OPERATIONS.groups()}
    found["connections"] = link_counters(OPERATIONS.is_ours)
    dist.send(torch.ones(2, 4, dtype=torch.int64), group=pair, group_dst=peer)
    waits.wait()
    del waits
    dist.barrier()
    groups.close()
    OPERATIONS.keep(0)
    found["restored"] = all(vars(dist.ProcessGroup)[name] is plain[name] for name in ("send", "recv"))
    return found


def test_messages_are_noted_with_their_ends_sizes_and_places(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(2, exchange, 100)):
        *done, last = found["messages"]
        assert [one["done"] for one in done] == [True] * 8
        assert [one["number"] for one in done if one["kind"] == "send"] == [1, 2, 3, 4]
        assert {(one["peer"], one["tag"], one["dtype"]) for one in done} == {(1 - rank, 5, "float32")}
        assert (last["kind"], last["done"], last["sizes"], last["dtype"]) == (
            "recv",
            False,
            [[2, 4]],
            "int64",
        )
        assert "test_operation_record.py" in last["place"]
        assert last["place"].endswith(" in exchange")
        whole, pair = found["groups"]
        assert (whole["ranks"], whole["axis"]) == ([0, 1], "")
        assert (pair["axis"], pair["name"]) == ("tp", last["group"])
        assert found["restored"]
        ends = {(one["local"], one["peer"]) for one in found["connections"]}
        assert ends, "connections of the groups are told"


def test_only_the_newest_messages_are_kept_and_none_where_none_is_asked_for(pool: Pool) -> None:
    few, none = pool.run(2, exchange, 3)[0], pool.run(2, exchange, 0)[0]
    assert len(few["messages"]) == 3
    assert [one["number"] for one in few["messages"] if one["kind"] == "send"] == [4]
    assert none["messages"] == []
    assert none["restored"]


def test_counters_of_a_connection_are_its_kernels() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            client.sendall(b"x" * 1000)
            assert accepted.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
            time.sleep(0.2)
            ours = {client.getsockname()[1], server.getsockname()[1]}

            def wanted(info: SocketInfo) -> bool:
                return info.peer is not None and {info.local[1], info.peer[1]} == ours

            near, far = sorted(link_counters(wanted), key=lambda one: -one["sent_bytes"])
            assert (near["sent_bytes"], near["received_bytes"], near["unacked"]) == (1000, 0, 0)
            assert (far["received_bytes"], far["retransmits"]) == (1000, 0)
            assert (near["local"], near["peer"]) == (far["peer"], far["local"])
            assert far["last_received_s"] >= 0.15
            assert 0 < near["rtt_s"] < 5
            assert link_counters(lambda info: False) == []
