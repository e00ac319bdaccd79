"""Attacks on a server that embeds photos."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from urllib.parse import quote

from fedemb.serving import serve
from tests.adversary.attacks.kind import Attack, Kind, World


def _request(world: World, draw: random.Random) -> Attack:
    many = draw.choice([1, 50, 257, 1000])
    bodies = {
        "deep lists": "[" * many * 100,
        "deep objects": '{"instances":' * many * 100,
        "no list": json.dumps({"instances": {"b64": ""}}),
        "empty list": json.dumps({"instances": []}),
        "too many": json.dumps({"instances": [{"b64": ""}] * (256 + many)}),
        "not text": os.urandom(8).hex() + "\\",
        "number": "1" * many,
        "null": "null",
        "no instance": json.dumps({"instances": [draw.choice([1, None, "x", [], {}])]}),
        "not base64": json.dumps({"instances": [{"b64": draw.choice(["é", "a", "a-_=", "\x00"])}]}),
        "base64 is a number": json.dumps({"instances": [{"b64": draw.choice([0, [], {}, True])}]}),
    }
    name = draw.choice(sorted(bodies))

    def act() -> str:
        try:
            for number, instance in enumerate(serve.instances_of(bodies[name].encode())):
                serve._file(instance, number)
        except serve.BadRequest:
            return ""
        except (Exception, RecursionError) as error:
            return f"{type(error).__name__}: {error}"
        return "the request was taken"

    return Attack(f"{name} ({many}) {quote(bodies[name][:60])}", act)


def _bodies(world: World, draw: random.Random) -> Attack:
    """Clients send at once, in chunks, and some leave; together they may hold so many bytes."""
    most, clients = draw.choice([100, 1000, 5000]), draw.randrange(2, 30)
    sizes = [
        draw.choice([1, most // 3, most // 2, most, most + 1, 3 * most]) for _ in range(clients)
    ]
    leaving, seed = draw.randrange(clients + 1), draw.randrange(2**32)

    async def stream(size: int, leaves: bool, chunks: random.Random) -> AsyncIterator[bytes]:
        sent = 0
        while sent < size:
            chunk = min(size - sent, chunks.randrange(1, 1 + most // 2))
            sent += chunk
            yield bytes(chunk)
            await asyncio.sleep(0)
            if leaves and sent > size // 2:
                raise ConnectionError("the client left")

    async def all_at_once() -> str:
        bodies, peak, problems = serve.Bodies(most), 0, list[str]()
        chunks = random.Random(seed)

        async def one(number: int) -> None:
            nonlocal peak
            try:
                async with bodies.read(stream(sizes[number], number < leaving, chunks)) as body:
                    peak = max(peak, bodies._held)
                    await asyncio.sleep(0)
                    if len(body) != sizes[number]:
                        problems.append("a body was cut")
            except (serve.TooMuch, ConnectionError):
                peak = max(peak, bodies._held)

        await asyncio.gather(*(one(number) for number in range(clients)))
        if peak > most:
            problems.append(f"{peak} bytes were held, at most {most} are allowed")
        if bodies._held:
            problems.append(f"{bodies._held} bytes are counted after all have ended")
        return "; ".join(problems)

    text = f"{clients} clients, {most} bytes, {leaving} leave, {seed % 10_000}"
    return Attack(text, lambda: asyncio.run(all_at_once()))


KINDS = (
    Kind("malformed requests", _request, 30),
    Kind("concurrent bodies of requests", _bodies, 20),
)
