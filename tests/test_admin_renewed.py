"""Values that are made anew when they are asked for."""

from __future__ import annotations

import asyncio

import pytest
from kvpager.api.admin.renewed import Renewed
from kvpager.tiers.errors import ServiceUnavailableError


class Counted:
    """Makes 1, 2, 3, ..., each when `let_go` allows it."""

    def __init__(self) -> None:
        self.begun = 0
        self.may = asyncio.Event()
        self.may.set()
        self.fails = False

    async def make(self) -> int:
        self.begun += 1
        number = self.begun
        await self.may.wait()
        if self.fails:
            raise ServiceUnavailableError("not now")
        return number


def test_those_who_ask_at_once_are_given_one_value() -> None:
    async def run() -> None:
        made = Counted()
        kept = Renewed(made.make, 60.0)
        values = await asyncio.gather(*(kept.get() for _ in range(5)))
        assert [one.value for one in values] == [1] * 5
        assert (await kept.get()).value == 1

    asyncio.run(run())


def test_an_old_value_is_made_anew_and_given_meanwhile() -> None:
    async def run() -> None:
        made = Counted()
        kept = Renewed(made.make, 0.0)
        assert (await kept.get()).value == 1
        made.may.clear()
        late = await kept.get()
        assert (late.value, made.begun) == (1, 2)
        assert late.age > 0
        made.may.set()
        await kept.settle()
        assert (await kept.get()).value >= 2

    asyncio.run(run())


def test_after_a_change_nobody_is_given_what_was_begun_before() -> None:
    async def run() -> None:
        made = Counted()
        kept = Renewed(made.make, 60.0)
        assert (await kept.get()).value == 1
        made.may.clear()
        newest = asyncio.create_task(kept.get(newest=True))
        await asyncio.sleep(0.01)
        kept.outdate()
        after = asyncio.create_task(kept.get())
        await asyncio.sleep(0.01)
        made.may.set()
        assert (await newest).value == 2
        assert (await after).value == 3

    asyncio.run(run())


def test_what_takes_long_is_made_more_seldom() -> None:
    async def run() -> None:
        made = Counted()
        made.may.clear()
        kept = Renewed(made.make, 0.0, share=0.01)
        asyncio.get_running_loop().call_later(0.05, made.may.set)
        first = await kept.get()
        assert first.took >= 0.04
        await asyncio.sleep(0.1)
        assert (await kept.get()).value == 1

    asyncio.run(run())


def test_a_failure_is_told_to_who_asks_and_the_next_tries_again() -> None:
    async def run() -> None:
        made = Counted()
        made.fails = True
        kept = Renewed(made.make, 60.0)
        for _ in range(2):
            with pytest.raises(ServiceUnavailableError, match="not now"):
                await kept.get()
        made.fails = False
        assert (await kept.get()).value == 3
        kept.forget()
        assert (await kept.get()).value == 4

    asyncio.run(run())
