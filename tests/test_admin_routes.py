"""The admin API over a real sidecar: what operators are told, and what they have done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvpager.api.client import Connection
from kvpager.kvstore.control import EngineReport
from kvpager.kvstore.cost import ComputeCost, CostModel, LinkCost
from kvpager.tests.admin_server import ROOT, AdminServer, prompt, store_prompt
from kvpager.tests.raw_client import LAYOUT, await_true

pytestmark = pytest.mark.xdist_group("admin routes")
BLOCK = LAYOUT.block_bytes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    folder = tmp_path_factory.mktemp("admin")
    with AdminServer(
        folder / "socket", f"--cold=disk://{folder}/cold", "--cold-bytes=64M", "--quota=rich=4M"
    ) as made:
        yield made


@pytest.fixture
def engine(server: AdminServer) -> Iterator[Connection]:
    with server.client(name="engine") as made:
        yield made


def listed(server: AdminServer, tenant: str, **query: Any) -> list[dict[str, Any]]:
    """Prefixes of a tenant, page by page."""
    found: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = server.get("/v1/prefixes", params={"tenant": tenant, **query, **cursor})
        found += page["items"]
        if page["next_cursor"] is None:
            return found
        cursor = {"cursor": page["next_cursor"]}


def host(server: AdminServer, tenant: str) -> dict[str, Any]:
    """What a tenant has of host memory."""
    shares = server.get("/v1/tiers/host")["tenants"]
    found: dict[str, Any] = next(share for share in shares if share["tenant"] == tenant)
    return found


def test_the_status_tells_what_the_sidecar_is_and_has(server: AdminServer, engine: Connection) -> None:
    store_prompt(engine, prompt(1, 3), tenant="rich")
    status = server.get("/v1/status")
    assert bytes.fromhex(status["boot_id"]) == engine.boot_id
    assert status["pid"] == server.serve.running.pid
    assert (status["tiers"], status["role"], status["draining"]) == (["host", "cold"], "read", False)
    assert status["cold"]["kind"] == "disk"
    (space,) = [one for one in status["spaces"] if one["tenant"] == "rich"]
    assert (space["num_layers"], space["window"], space["block_bytes"]) == (1, None, BLOCK)
    assert space["resident_blocks"] == 3
    assert server.ask("GET", "/v1/status", "operate").json()["role"] == "operate"


def test_a_tier_tells_who_fills_it(server: AdminServer, engine: Connection) -> None:
    hashes = store_prompt(engine, prompt(2, 5), tenant="fills")
    space = engine.space(LAYOUT, tenant="fills")
    with space.match(hashes[:2]):
        share = host(server, "fills")
        assert (share["blocks"], share["used_bytes"], share["leased_bytes"]) == (5, 5 * BLOCK, 2 * BLOCK)
    tier = server.get("/v1/tiers/host")
    assert tier["capacity_bytes"] == 8 << 20
    parts = ("idle", "leased", "pinned", "reserved")
    assert tier["used_bytes"] == sum(tier[f"{part}_bytes"] for part in parts)
    assert [one["tier"] for one in server.get("/v1/tiers")["items"]] == ["host", "cold"]
    engine.flush()
    cold = server.get("/v1/tiers/cold")
    assert {flow["source"] for flow in cold["flows"]} == {"host", "cold"}
    assert cold["capacity_bytes"] == 64 << 20
    assert cold["used_bytes"] + cold["free_bytes"] == cold["capacity_bytes"]
    assert cold["used_bytes"] >= 5 * BLOCK
    assert server.ask("GET", "/v1/tiers/device").status_code == 404


def test_the_map_adds_up_to_the_arena_at_any_size(server: AdminServer, engine: Connection) -> None:
    store_prompt(engine, prompt(3, 7), tenant="mapped")
    shares = ("vacant", "free", "reserved", "leased", "pinned", "idle")
    for cells in (1, 2, 3, 64, 1024, 4096):
        seen = server.get("/v1/tiers/host/map", params={"cells": cells})
        assert seen["count"] <= cells
        assert (
            seen["count"] * seen["cell_bytes"]
            >= seen["capacity_bytes"]
            > (seen["count"] - 1) * seen["cell_bytes"]
        )
        lists = [seen["cells"][share] for share in shares]
        assert all(sum(cell) == pytest.approx(1, abs=1e-3) for cell in zip(*lists, strict=True))
    held = sum(sum(one) for one in lists[2:]) * seen["cell_bytes"]
    assert held == pytest.approx(seen["capacity_bytes"] - seen["free_bytes"], rel=0.02)
    mapped = next(at for at, space in enumerate(seen["spaces"]) if space["tenant"] == "mapped")
    at = seen["cells"]["space"].index(mapped)
    assert seen["cells"]["age_seconds"][at] < 60
    assert server.ask("GET", "/v1/tiers/cold/map").status_code == 404


def test_prefixes_are_listed_where_prompts_end_and_part(server: AdminServer, engine: Connection) -> None:
    first = store_prompt(engine, prompt(4, 6, shared=2), tenant="lists")
    second = store_prompt(engine, prompt(5, 4, shared=2), tenant="lists")
    space = engine.space(LAYOUT, tenant="lists")
    for _ in range(3):
        space.match(second).release()
    largest = listed(server, "lists", limit=1)
    assert [(one["hash"], one["depth"], one["tokens"]) for one in largest] == [
        (first[-1].hex(), 6, 96),
        (second[-1].hex(), 4, 64),
    ]
    assert [(one["own_blocks"], one["bytes"]) for one in largest] == [(4, 6 * BLOCK), (2, 4 * BLOCK)]
    (shared,) = listed(server, "lists", order="shared")
    assert (shared["hash"], shared["children"], shared["continuations"]) == (first[1].hex(), 2, 2)
    assert shared["own_blocks"] == 8
    hottest = listed(server, "lists", order="hottest")
    assert (hottest[0]["hash"], hottest[0]["hits"]) == (second[-1].hex(), 3)
    assert hottest[0]["idle_seconds"] < 60
    assert listed(server, "nobody") == []
    for cursor in ("?", "WzFd", "WzEsICJ4IiwgInkiXQ"):
        assert server.ask("GET", "/v1/prefixes", params={"cursor": cursor}).status_code == 404


def test_a_prefix_tells_its_chain_in_parts(server: AdminServer, engine: Connection) -> None:
    hashes = store_prompt(engine, prompt(6, 5), tenant="chain")
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        part = server.get(f"/v1/prefixes/{hashes[-1].hex()}", params={"limit": 2, **cursor})
        found += [one["hash"] for one in part["chain"]]
        assert (part["chain_blocks"], part["complete"]) == (5, True)
        if part["next_cursor"] is None:
            break
        cursor = {"cursor": part["next_cursor"]}
    assert found == [name.hex() for name in hashes]
    assert part["prefix"]["parent"] == hashes[-2].hex()


def test_a_pin_is_given_once_and_what_others_pin_stays(server: AdminServer, engine: Connection) -> None:
    first = store_prompt(engine, prompt(7, 5, shared=2), tenant="pins")
    second = store_prompt(engine, prompt(8, 4, shared=2), tenant="pins")
    path = [f"/v1/prefixes/{one[-1].hex()}/pin" for one in (first, second)]
    assert server.operate("PUT", path[0])["changed_blocks"] == 5
    assert server.operate("PUT", path[0])["changed_blocks"] == 0
    assert server.operate("PUT", path[1])["changed_blocks"] == 2
    assert host(server, "pins")["pinned_bytes"] == 7 * BLOCK
    assert server.operate("DELETE", path[0])["changed_blocks"] == 3
    assert host(server, "pins")["pinned_bytes"] == 4 * BLOCK
    assert server.operate("DELETE", path[1])["changed_blocks"] == 4
    assert host(server, "pins")["pinned_bytes"] == 0


def test_a_lookup_tells_how_much_of_a_prompt_is_there(server: AdminServer, engine: Connection) -> None:
    store_prompt(engine, prompt(9, 4), tenant="looked up")
    space = next(one for one in server.get("/v1/status")["spaces"] if one["tenant"] == "looked up")["id"]
    asked = {"tokens": prompt(9, 6), "root": ROOT.hex(), "space": space}
    before = server.get(f"/v1/prefixes?space={space}")["items"][0]["hits"]
    answer = server.ask("POST", "/v1/prefixes/lookup", json=asked)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["spaces"]
    assert (found["blocks"], found["host_blocks"], found["cold_blocks"]) == (6, 4, 0)
    assert (found["hit_tokens"], found["hit_bytes"]) == (64, 4 * BLOCK)
    assert found["recompute_seconds"] is None
    assert found["saved_seconds"] is None
    assert found["recompute_reason"]
    assert (found["taken_blocks"], found["saved_tokens"]) == (4, 64)
    # Looking is no use of a prefix.
    assert server.get(f"/v1/prefixes?space={space}")["items"][0]["hits"] == before


def test_a_lookup_reckons_by_what_an_engine_reported_of_its_costs(
    server: AdminServer, engine: Connection
) -> None:
    store_prompt(engine, prompt(12, 4), tenant="reckoned")
    here = engine.space(LAYOUT, tenant="reckoned")
    asked = {"tokens": prompt(12, 6), "root": ROOT.hex(), "space": here.id.hex()}

    def reckoned(compute: ComputeCost | None, seconds_per_byte: float) -> dict[str, Any]:
        link = LinkCost(0.0, seconds_per_byte)
        costs = CostModel(LAYOUT.block_size, LAYOUT.block_bytes, compute, link, link)
        engine.report(EngineReport(block_bytes=LAYOUT.block_bytes, space=here.id, costs=costs))
        server.get("/v1/status?newest=true")
        (found,) = server.ask("POST", "/v1/prefixes/lookup", json=asked).json()["spaces"]
        return dict(found)

    await_true(lambda: reckoned(None, 0.0)["host_load_seconds"] == 0.0)
    assert "too few prompts" in reckoned(None, 0.0)["recompute_reason"]
    compute = ComputeCost(0.0, 1e-3, 0.0)
    await_true(lambda: reckoned(compute, 0.0)["recompute_seconds"] is not None)
    found = reckoned(compute, 0.0)
    assert found["recompute_seconds"] == pytest.approx(4 * LAYOUT.block_size * 1e-3)
    assert found["recompute_reason"] is None
    assert found["saved_seconds"] == pytest.approx(found["recompute_seconds"])
    assert found["taken_blocks"] == 4
    await_true(lambda: reckoned(compute, 1.0)["taken_blocks"] == 0)
    found = reckoned(compute, 1.0)
    assert found["host_load_seconds"] == pytest.approx(4.0 * LAYOUT.block_bytes)
    assert (found["saved_tokens"], found["saved_seconds"]) == (0, 0)


def test_text_is_looked_up_with_a_tokenizer_of_this_machine(server: AdminServer) -> None:
    pytest.importorskip("tokenizers")
    asked = {"text": "hello", "root": ROOT.hex(), "tokenizer": "nobody/has-this"}
    answer = server.ask("POST", "/v1/prefixes/lookup", json=asked)
    assert (answer.status_code, answer.json()["detail"]) == (
        404,
        "this machine has no tokenizer nobody/has-this",
    )
    assert (
        server.ask("POST", "/v1/prefixes/lookup", json={**asked, "tokenizer": "../../etc"}).status_code == 404
    )


def test_what_is_demoted_comes_up_again(server: AdminServer, engine: Connection) -> None:
    first = store_prompt(engine, prompt(10, 5, shared=1), tenant="moves")
    second = store_prompt(engine, prompt(11, 3, shared=1), tenant="moves")
    space = next(one for one in server.get("/v1/status")["spaces"] if one["tenant"] == "moves")["id"]
    moved = server.operate("POST", f"/v1/prefixes/{first[-1].hex()}/demote?space={space}")
    assert (moved["asked_blocks"], moved["moved_blocks"]) == (4, 4)
    here = engine.space(LAYOUT, tenant="moves")
    with here.match(first) as lease:
        assert len(lease) == 1
    with here.match(second) as lease:
        assert len(lease) == 3
    lookup = {"tokens": prompt(10, 5, shared=1), "root": ROOT.hex(), "space": space}
    (found,) = server.ask("POST", "/v1/prefixes/lookup", json=lookup).json()["spaces"]
    assert (found["host_blocks"], found["cold_blocks"]) == (1, 4)
    names = [name.hex() for name in first]
    warmed = server.operate("POST", "/v1/warm", {"hashes": [*names, "0" * 32], "space": space})
    assert (warmed["asked_blocks"], warmed["resident_blocks"], warmed["loaded_blocks"]) == (6, 5, 4)
    with here.match(first) as lease:
        assert len(lease) == 5
    server.operate("POST", f"/v1/prefixes/{first[-1].hex()}/demote?space={space}")
    promoted = server.operate("POST", f"/v1/prefixes/{names[1]}/promote?space={space}")
    assert promoted["moved_blocks"] == 1


def test_a_prefix_that_goes_from_one_tenant_takes_nothing_of_another(
    server: AdminServer, engine: Connection
) -> None:
    long, short = prompt(31, 8), prompt(31, 5)
    hashes = store_prompt(engine, long, tenant="goes")
    store_prompt(engine, short, tenant="keeps")
    last = hashes[-1].hex()
    asked = {"prefixes": [last, hashes[4].hex()], "tenant": "goes"}
    assert server.operate("POST", "/v1/evict", {**asked, "dry_run": True})["blocks"] == 8
    some = server.operate("POST", "/v1/evict", {"prefixes": [last], "most_bytes": 3 * BLOCK})
    assert (some["blocks"], host(server, "goes")["blocks"], host(server, "keeps")["blocks"]) == (3, 5, 5)
    rest = {"prefixes": [hashes[4].hex()], "tenant": "goes"}
    assert server.operate("POST", "/v1/evict", rest)["blocks"] == 5
    assert (host(server, "goes")["blocks"], host(server, "keeps")["blocks"]) == (0, 5)


def test_what_host_memory_has_too_is_not_lost_with_its_copy(server: AdminServer, engine: Connection) -> None:
    tokens = prompt(32, 4)
    hashes = store_prompt(engine, tokens, tenant="twice")
    assert server.operate("POST", f"/v1/prefixes/{hashes[-1].hex()}/demote")["moved_blocks"] == 4
    # They are computed again by an engine that did not look for them: nobody knows of the copies.
    store_prompt(engine, tokens, tenant="twice")
    asked = {"prefixes": [hashes[-1].hex()], "tenant": "twice", "tier": "cold"}
    gone = server.operate("POST", "/v1/evict", asked)
    assert (gone["blocks"], gone["lost_blocks"], host(server, "twice")["blocks"]) == (4, 0, 4)


def test_an_eviction_is_tried_before_it_is_done(server: AdminServer, engine: Connection) -> None:
    hashes = store_prompt(engine, prompt(12, 6), tenant="evicts")
    engine.flush()
    for nothing in ({}, {"everything": False}, {"spaces": [], "dry_run": True}):
        assert server.ask("POST", "/v1/evict", "operate", json=nothing).status_code == 422
    assert server.ask("POST", "/v1/evict", "operate", json={"tenant": "unheard of"}).status_code == 404
    would = server.operate("POST", "/v1/evict", {"tenant": "evicts", "dry_run": True})
    assert would == {"dry_run": True, "blocks": 6, "bytes": 6 * BLOCK, "lost_blocks": 0}
    assert host(server, "evicts")["blocks"] == 6
    some = server.operate("POST", "/v1/evict", {"tenant": "evicts", "most_bytes": 2 * BLOCK})
    assert some["blocks"] == 2
    rest = server.operate("POST", "/v1/evict", {"prefixes": [hashes[0].hex()]})
    assert rest["blocks"] == 4
    assert host(server, "evicts")["blocks"] == 0


def test_a_tenant_is_gone_from_every_tier(server: AdminServer, engine: Connection) -> None:
    store_prompt(engine, prompt(13, 4), tenant="goes/away")
    engine.flush()
    purged = server.operate("DELETE", "/v1/tenants/goes%2Faway")
    assert (purged["host_blocks"], purged["cold_blocks"], purged["left"]) == (4, 4, {})
    assert server.ask("DELETE", "/v1/tenants/unheard%20of", "operate").status_code == 404


def test_sessions_are_told_and_commanded_through_their_engine(server: AdminServer) -> None:
    with server.client(name="talker") as engine:
        engine.report(EngineReport({"a/b": "decoding", "c": "asleep"}, BLOCK, 10, 4, 3.0, 2.0))
        await_true(lambda: len(server.get("/v1/sessions")["items"]) == 2)
        first = server.get("/v1/sessions?limit=1")
        assert [one["id"] for one in first["items"]] == ["a/b"]
        assert first["items"][0]["engine"].startswith("talker")
        rest = server.get("/v1/sessions", params={"limit": 1, "cursor": first["next_cursor"]})
        assert [(one["id"], one["asleep"]) for one in rest["items"]] == [("c", True)]
        assert [one["id"] for one in server.get("/v1/sessions?state=awake")["items"]] == ["a/b"]
        device = server.get("/v1/tiers/device")
        assert (device["capacity_bytes"], device["used_bytes"]) == (10 * BLOCK, 4 * BLOCK)
        assert device["last_blocks_bytes"] == 2 * BLOCK
        status = server.get("/v1/status")
        assert (status["sessions_awake"], status["sessions_asleep"]) == (1, 1)
        done = engine.on_command(lambda command: command.done(7))
        answer = server.operate("POST", "/v1/sessions/a%2Fb/sleep")
        assert answer == {"session": "a/b", "command": "sleep", "blocks": 7}
        done()
        engine.on_command(lambda command: command.refuse("not now"))
        refused = server.ask("POST", "/v1/sessions/c/wake", "operate")
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:kvpager:problem:command")
        assert "not now" in refused.json()["detail"]
    assert server.ask("POST", "/v1/sessions/nobody/wake", "operate").status_code == 404


def test_a_session_is_gone_with_its_record(server: AdminServer, engine: Connection) -> None:
    space = engine.space(LAYOUT, tenant="talks")
    assert (
        server.operate("DELETE", f"/v1/sessions/some%20id?root={ROOT.hex()}&space={space.id.hex()}")["left"]
        == {}
    )


def test_a_client_is_disconnected_and_comes_back(server: AdminServer) -> None:
    with server.client(name="cut off") as engine:
        hashes = store_prompt(engine, prompt(14, 2), tenant="cut")
        with engine.space(LAYOUT, tenant="cut").match(hashes) as lease:
            clients = server.get("/v1/clients")["items"]
            (found,) = [one for one in clients if one["name"].startswith("cut off")]
            assert found["leased_blocks"] == 2
            before = engine.counters.connects
            assert server.operate("DELETE", f"/v1/clients/{found['id']}") == {"count": 1}
            await_true(lambda: engine.counters.connects > before and engine.ready)
            assert host(server, "cut")["leased_bytes"] == 2 * BLOCK
            assert len(lease) == 2
        assert server.ask("DELETE", f"/v1/clients/{found['id']}", "operate").status_code == 404
        (own,) = [one for one in clients if one["name"].startswith("admin")]
        assert server.ask("DELETE", f"/v1/clients/{own['id']}", "operate").status_code == 409


def test_settings_have_a_tag(server: AdminServer) -> None:
    answer = server.ask("GET", "/v1/config")
    assert answer.json()["quotas"] == {"rich": 4 << 20}
    again = server.ask("GET", "/v1/config", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    policy = server.get("/v1/policy")
    assert policy["policy"] in policy["policies"]


def test_settings_are_changed_whole_and_only_as_they_were_seen(server: AdminServer) -> None:
    seen = server.ask("GET", "/v1/config")
    before = seen.json()
    tag = {"If-Match": seen.headers["ETag"]}
    answer = server.ask("PATCH", "/v1/config", "operate", json={"clean_ahead": 0.5}, headers=tag)
    assert answer.json()["changed"] == {"clean_ahead": [before["clean_ahead"], 0.5]}
    assert answer.json()["config"] == {**before, "clean_ahead": 0.5} == server.get("/v1/config")
    late = server.ask("PATCH", "/v1/config", "operate", json={"clean_ahead": 0.6}, headers=tag)
    assert late.status_code == 412
    wrong = {"clean_ahead": 0.7, "log_level": "shout"}
    assert server.ask("PATCH", "/v1/config", "operate", json=wrong).status_code == 422
    assert server.ask("PATCH", "/v1/config", "operate", json={"clean_a_head": 0.7}).status_code == 422
    assert server.get("/v1/config")["clean_ahead"] == 0.5
    tag = {"If-Match": answer.headers["ETag"]}
    again = server.ask("PATCH", "/v1/config", "operate", json=before, headers=tag)
    assert again.json()["config"] == before
    assert server.operate("PUT", "/v1/policy", {"policy": before["policy"]})["changed"] == {}


def test_a_weight_that_can_never_be_is_unprocessable_and_one_of_another_policy_a_conflict(
    server: AdminServer,
) -> None:
    def status(**asked: object) -> int:
        return server.ask("PATCH", "/v1/config", "operate", json=asked).status_code

    before = server.get("/v1/config")
    server.operate("PUT", "/v1/policy", {"policy": "lru"})
    for asked, code in (
        ({"policy_weights": {"no_such": 1.0}}, 422),
        ({"policy_weights": {"small_share": 7.0}}, 422),
        ({"policy_weights": {"small_share": 0.2, "prior": 8.0}}, 422),
        ({"policy": "lru", "policy_weights": {"small_share": 0.2}}, 422),
        ({"policy": "s3fifo", "policy_weights": {"small_share": 0.0}}, 422),
        ({"retention_ttl": 0}, 422),
        ({"retention_ttl": 1e300}, 422),
        ({"policy_weights": {"small_share": 0.2}}, 409),
        ({"policy": "s3fifo", "policy_weights": {"small_share": 0.2}}, 200),
        ({"policy_weights": {"small_share": 0.3}}, 200),
    ):
        assert status(**asked) == code, asked
    assert server.ask("PUT", "/v1/policy", "operate", json={"policy": "none"}).status_code == 422
    server.operate("PATCH", "/v1/config", before)
    assert server.get("/v1/config") == before


def test_a_sidecar_is_drained_and_takes_blocks_again(server: AdminServer, engine: Connection) -> None:
    store_prompt(engine, prompt(16, 3), tenant="drains")
    assert server.operate("POST", "/v1/drain", {}) == {"draining": True, "dirty_blocks": 0}
    assert server.get("/v1/status")["draining"]
    assert server.get("/readyz")["status"] == "degraded"
    assert server.ask("POST", "/v1/warm", "operate", json={"hashes": ["0" * 32]}).status_code == 409
    assert not server.operate("POST", "/v1/drain", {"on": False})["draining"]
    assert server.get("/readyz")["status"] == "ready"


def test_a_cold_tier_is_detached_and_attached_while_it_serves(
    server: AdminServer, engine: Connection, tmp_path: Path
) -> None:
    hashes = store_prompt(engine, prompt(17, 3), tenant="attached")
    url = server.get("/v1/status")["cold"]["url"]
    assert server.ask("POST", "/v1/tiers/cold/attach", "operate", json={"url": url}).status_code == 409
    assert server.operate("POST", "/v1/tiers/cold/detach", {})["cold"] is None
    assert server.get("/v1/status")["tiers"] == ["host"]
    assert server.ask("POST", "/v1/tiers/cold/detach", "operate", json={}).status_code == 409
    assert server.ask("GET", "/v1/tiers/cold").status_code == 404
    path = f"/v1/prefixes/{hashes[-1].hex()}/demote"
    assert server.ask("POST", path, "operate").status_code == 409
    refused = server.ask("POST", "/v1/tiers/cold/attach", "operate", json={"url": f"disk://{tmp_path}"})
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:kvpager:problem:config")
    attached = server.operate("POST", "/v1/tiers/cold/attach", {"url": url, "capacity_bytes": 64 << 20})
    assert attached["cold"]["url"] == url
    engine.flush()
    assert server.get("/v1/tiers/host")["dirty_bytes"] == 0


def test_events_come_as_they_happen(server: AdminServer, engine: Connection) -> None:
    engine.space(LAYOUT, tenant="heard")
    with httpx.stream("GET", f"{server.url}/v1/events", timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        hashes = store_prompt(engine, prompt(15, 3), tenant="heard")
        stored: list[str] = []
        while len(stored) < 3:
            line = next(lines)
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if (event["kind"], event["tier"]) == ("stored", "host"):
                    stored += event["hashes"]
                    assert event["blocks"] == len(event["hashes"])
        assert stored == [name.hex() for name in hashes]


def test_the_reference_page_has_every_route(server: AdminServer) -> None:
    page = server.ask("GET", "/docs").text
    for path in server.get("/openapi.json")["paths"]:
        assert path.replace("{", "{") in page
    assert "<script" not in page


def test_probes_say_that_it_lives_and_serves(server: AdminServer) -> None:
    assert server.get("/healthz") == {"status": "alive"}
    assert server.get("/readyz") == {"status": "ready", "degraded": []}


def test_files_of_the_dashboard_are_asked_for_again_each_time(server: AdminServer) -> None:
    answer = server.ask("GET", "/static/reference.css")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
    assert answer.headers["etag"]
    assert server.ask("GET", "/static/../models.py").status_code in (401, 404)
    assert server.ask("GET", "/static/%2e%2e/models.py").status_code in (401, 404)


def test_nothing_of_a_token_is_in_the_place_file(server: AdminServer) -> None:
    place = Path(f"{server.path}.admin.json")
    tokens = Path(f"{server.path}.admin.token")
    assert {path.stat().st_mode & 0o777 for path in (place, tokens)} == {0o600}
    assert not any(token in place.read_text() for token in server.tokens.values())
