"""`block ui`: opens a file in the live page."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from services.live_page.recorded import RecordedFrames

LOOPBACK = "127.0.0.1"
DRAIN_S = 1.0


@click.command()
@click.argument("file")
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on.  [default: any free port]")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine (--host); the page is plain HTTP.")
def ui(file: str, host: str, port: int, *, insecure: bool) -> None:
    """Show FILE in the live page until Ctrl-C: instances as lanes over time, decisions, accuracy.

    FILE is a recording (JSON lines of block serve scheduler --record), or a CSV of requests (block simulate --csv,
    block bench --csv). The page is served on this machine only, unless --host says otherwise.
    """
    from services.live_page.recorded import frames_of_file
    from services.security.exposure import is_on_loopback

    if not (insecure or is_on_loopback(host)):
        raise ValueError(f"host: {host} is reached from other machines, in plain text: give --insecure to accept it")

    asyncio.run(_serve(frames_of_file(file), host, port))


async def _serve(source: RecordedFrames, host: str, port: int) -> None:
    from services.http.application import Application
    from services.http.server import answering, listening
    from services.live_page.pages import PAGE, live_page_routes

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app = Application()
    app.routes = live_page_routes(source, app)
    with listening(host, port) as listener:
        async with answering(app, listener, DRAIN_S):
            click.echo(f"http://{host}:{listener.getsockname()[1]}{PAGE}")
            await stop.wait()
