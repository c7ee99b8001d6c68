"""Agents of `bench_agents_endpoint.py`: a process that only sends requests over kept connections, with as little work
of its own as that takes. What to do comes on standard input, what it took goes to standard output."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import sys
import time
from typing import Any
from urllib.parse import urlsplit


def engine_time(name: str, mean_s: float) -> float:
    """As the simulated engine has it."""
    draw = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") / 2**32
    return mean_s * (0.5 + draw)


async def agent(work: dict[str, Any], number: int, until: float, found: list[tuple[float, float]]) -> None:
    """Conversations, one after the other; when each request began, and what was added to it."""
    await asyncio.sleep(work["arrive_s"] * number / len(work["keys"]))
    place = urlsplit(work["url"])
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = f"POST {place.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {work['keys'][number]}\r\n"
    asked, messages = 0, []
    while time.perf_counter() < until:
        if asked % work["turns"] == 0:
            messages = [
                {"role": "system", "content": "You are a careful agent. " * 8},
                {"role": "user", "content": f"Task {number}.{asked}"},
            ]
        body = json.dumps({"model": "m", "messages": messages, "stream": work["stream"]}).encode()
        name = f"bench-{number}" + (f".t{asked}" if asked else "")
        started = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        said = await answer(reader, work["stream"])
        found.append((started, time.perf_counter() - started - engine_time(name, work["mean_s"])))
        asked += 1
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Observation {asked}: " * 5}]
    writer.close()


async def answer(reader: asyncio.StreamReader, stream: bool) -> str:
    """The text of one answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    if not stream:
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return json.loads(await reader.readexactly(length))["choices"][0]["message"]["content"]
    data = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        data += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def main() -> None:
    """Run them all, and count from when the last of them has arrived."""
    work = json.loads(sys.stdin.read())
    found: list[tuple[float, float]] = []
    began = time.perf_counter() + work["arrive_s"]
    until = began + work["seconds"]
    await asyncio.gather(*(agent(work, number, until, found) for number in range(len(work["keys"]))))
    counted = [added for started, added in found if started >= began]
    took_s = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    print(json.dumps({"added_s": counted, "took_s": took_s, "requests": len(found), "cpu_s": cpu_s}))


if __name__ == "__main__":
    asyncio.run(main())
