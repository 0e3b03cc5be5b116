"""A reward that takes its time."""

import asyncio


async def late(task) -> float:
    await asyncio.sleep(0.7)
    return float(len(task.response) % 2)
