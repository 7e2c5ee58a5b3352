"""Tenants through a sidecar: quotas, tokens that are bound to tenants, and what outlives a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpager.api.cli import main
from kvpager.api.client import connect
from kvpager.api.client_async import connect_async
from kvpager.api.messages import Event, GetStats, Match, Put, Reserve, Stats, Subscribe
from kvpager.api.remote_access import RemoteAccess, read_tokens
from kvpager.api.wire import Notice
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import LAYOUT, RawClient, Running, names, store
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.errors import AccessDeniedError, ConfigError, QuotaError

SIZE = LAYOUT.block_bytes
QUOTA = 4
ALL, ANNA, BOTH = "token-of-all....", "token-of-anna...", "token-of-both..."
TOKENS = {ALL: None, ANNA: frozenset({"anna"}), BOTH: frozenset({"anna", "bert"})}


@pytest.fixture
def host() -> Iterator[HostStore]:
    with HostStore(1 << 20, extent_bytes=1 << 16, quotas={"anna": QUOTA * SIZE}) as made:
        yield made


@pytest.fixture
def running(host: HostStore, tmp_path: Path) -> Iterator[Running]:
    remote = RemoteAccess("127.0.0.1", 0, TOKENS)
    with Running(tmp_path / "socket", host, remote=remote) as sidecar:
        yield sidecar


@pytest.fixture
def client(running: Running) -> Iterator[RawClient]:
    with RawClient(running.path) as made:
        yield made


def test_a_tenant_at_its_quota_is_told_so_and_others_are_not(client: RawClient) -> None:
    anna, bert = client.open(tenant="anna"), client.open(tenant="bert")
    assert anna != bert
    store(client, anna, 0, QUOTA)
    lease = client.call(Match(anna, names(0, QUOTA), 0.0))
    assert len(lease.slots) == QUOTA
    with pytest.raises(QuotaError, match="tenant 'anna' has a quota"):
        client.call(Reserve(anna, names(100, 1), 0.0))
    with pytest.raises(QuotaError):
        client.call(Put(anna, names(100, 1), bytes(SIZE), 0.0))
    store(client, bert, 0, 2 * QUOTA)
    assert len(client.call(Match(bert, names(0, 2 * QUOTA), 0.0)).slots) == 2 * QUOTA
    counted = client.call(GetStats(), Stats).values["tenants"]
    assert (counted["anna"]["bytes"], counted["anna"]["quota"]) == (QUOTA * SIZE, QUOTA * SIZE)
    assert (counted["anna"]["over_quota"], counted["bert"]["over_quota"]) == (2, 0)
    assert (counted["bert"]["blocks"], counted["bert"]["quota"]) == (2 * QUOTA, 0)


def test_a_client_that_is_not_strict_is_denied_without_taking_the_sidecar_for_dead(running: Running) -> None:
    with connect(str(running.path), tenant="anna") as connection:
        space = connection.space(LAYOUT)
        assert space.tenant == "anna"
        with space.reserve(names(0, QUOTA)), space.reserve(names(100, 2)) as reservation:
            assert reservation.status.tolist() == [ReserveStatus.DENIED] * 2
        assert connection.counters.over_quota == 1
        assert connection.counters.unanswered == 0
        assert connection.space(LAYOUT, tenant="bert").id != space.id


def test_a_strict_client_is_told(running: Running) -> None:
    with connect(str(running.path), strict=True) as connection:
        space = connection.space(LAYOUT, tenant="anna")
        with space.reserve(names(0, QUOTA)), pytest.raises(QuotaError):
            space.reserve(names(100, 1))


async def _open(port: int, token: str, *tenants: str) -> int:
    async with await connect_async(
        f"kvpager://127.0.0.1:{port}", token=token, tenant=tenants[0]
    ) as connection:
        first = await connection.space(LAYOUT)
        others = [await connection.space(LAYOUT, tenant=tenant) for tenant in tenants[1:]]
        return len({first.id, *(one.id for one in others)})


def test_a_token_opens_the_spaces_of_its_tenants_alone(running: Running) -> None:
    for token, tenants in ((ALL, ("", "anna", "bert", "carl")), (ANNA, ("anna",)), (BOTH, ("anna", "bert"))):
        with connect(f"kvpager://127.0.0.1:{running.port}", token=token) as connection:
            for tenant in tenants:
                assert connection.space(LAYOUT, tenant=tenant).tenant == tenant
            for tenant in {"", "anna", "bert"}.difference(tenants):
                with pytest.raises(AccessDeniedError, match=f"the token is not one of tenant '{tenant}'"):
                    connection.space(LAYOUT, tenant=tenant)


def test_tokens_are_as_good_for_asyncio(running: Running) -> None:
    assert asyncio.run(_open(running.port, BOTH, "anna", "bert")) == 2
    with pytest.raises(AccessDeniedError, match="tenant 'bert'"):
        asyncio.run(_open(running.port, ANNA, "anna", "bert"))


def test_a_client_hears_of_its_tenants_alone(running: Running, client: RawClient) -> None:
    anna, bert = client.open(tenant="anna"), client.open(tenant="bert")
    with RawClient(running.port, token=ANNA) as bound, RawClient(running.port, token=ALL) as free:
        bound.call(Subscribe(True))
        free.call(Subscribe(True))
        store(client, bert, 0, 1)
        store(client, anna, 7, 1)
        for listener, expected in ((free, [names(0, 1), names(7, 1)]), (bound, [names(7, 1)])):
            for hashes in expected:
                frame = listener.receive()
                assert isinstance(frame, Notice)
                assert isinstance(frame.message, Event)
                assert frame.message.hashes == hashes
        assert list(bound.call(GetStats(), Stats).values["tenants"]) == ["anna"]


def test_a_line_of_a_token_file_may_name_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    lines = ("# who may come in: all", ALL, "", f" anna:{ANNA}", f"anna:{BOTH}", f"org:bert:{BOTH}\r")
    path.write_text(
        "\n".join((*lines, "  # of nobody:tttttttttttttttt", f"my team:{'n' * 16}", f"anna:{ALL}\n"))
    )
    path.chmod(0o600)
    assert read_tokens("--token-file", path) == {
        ALL: None,
        ANNA: frozenset({"anna"}),
        BOTH: frozenset({"anna", "org:bert"}),
        "n" * 16: frozenset({"my team"}),
    }
    token = "t" * 16
    for wrong, why in (
        ("anna:", "must have 16 to 1024 bytes, has 0"),
        (f"*:{token}", "stands for every other tenant"),
        ("anna:short", "must have 16 to 1024 bytes, has 5"),
        ("a" * 300 + ":" + token, "256 characters at most"),
        (f":{token}", "names no tenant before its colon"),
        (f"anna :{token}", "names no tenant before its colon"),
        (f"anna {token}", "has white space in its token"),
        (f"anna: {token}", "has white space in its token"),
        (f"{token} # anna's", "has white space in its token"),
        (f"{token}\t{token}", "has white space in its token"),
        (f"anna:{token}\x07", "not printable"),
    ):
        path.write_text(f"# tokens\n{ALL}\n{wrong}\n{ANNA}\n")
        with pytest.raises(ConfigError, match=f"--token-file: line 3 of {path} .*{why}") as raised:
            read_tokens("--token-file", path)
        assert "t" * 16 not in str(raised.value)


@pytest.mark.parametrize(
    ("quotas", "said"),
    [
        (["anna"], "must be TENANT=SIZE"),
        (["anna=much"], "must be a size like 8G"),
        (["anna=0"], "--quota: "),
        (["anna=1G", "anna=2G"], "names tenant 'anna' twice"),
        ([f"{'a' * 300}=1G"], "256 characters at most"),
    ],
)
def test_quotas_that_are_none_are_refused(
    quotas: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--quota={quota}" for quota in quotas]
    assert main(["serve", f"--socket={tmp_path / 'socket'}", *options]) != 0
    assert said in capsys.readouterr().err


def test_tenants_and_their_blocks_outlive_a_sidecar(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "socket", f"--quota=anna={QUOTA * SIZE}", "--quota=*=1M") as serve:
        with connect(str(serve.path), tenant="anna") as connection:
            space = connection.space(LAYOUT)
            with space.reserve(names(0, 2 * QUOTA), wait=20.0) as reservation:
                new = reservation.new
                assert len(new) == QUOTA
                reservation.commit()
        serve.kill()
        serve.start()
        with connect(str(serve.path), tenant="anna") as connection:
            with connection.space(LAYOUT).match(names(0, QUOTA)) as lease:
                assert len(lease) == QUOTA
            with connection.space(LAYOUT, tenant="").match(names(0, QUOTA)) as lease:
                assert len(lease) == 0
            counted = connection.stats()["tenants"]
            assert (counted["anna"]["blocks"], counted["anna"]["quota"]) == (QUOTA, QUOTA * SIZE)
            assert counted[""]["quota"] == 1 << 20
