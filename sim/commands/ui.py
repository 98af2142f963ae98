"""`drystep ui`: the local page."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import tempfile
from pathlib import Path

import click

from sim.commands.output import examples
from sim.errors import Fault, UserError

_FIRST = "llama2-7b-fsdp"
_HERE = "127.0.0.1"


@click.command(short_help="Open the local page: edit, predict, compare.", epilog=examples(
    "drystep ui", "drystep ui scenario.yaml --port 9000 --no-browser"))
@click.argument("scenario", required=False)
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True,
              help="Of this machine; 0 takes a free one.")
@click.option("--no-browser", is_flag=True, help="Say the address, with its token, and open nothing.")
def ui(scenario: str | None, port: int, no_browser: bool) -> None:
    """Open a page on this machine: a scenario in an editor, its prediction beside it, any two side by side.

    It is served to this machine alone (127.0.0.1), to whoever opens the address with the token that is printed, until
    Ctrl-C or SIGTERM. Needs pip install 'drystep[ui]'.
    """
    try:
        from werkzeug.serving import make_server

        from sim.web.app import make_app
    except ImportError:
        raise UserError(Fault("the page needs Flask", "ui", hint="pip install 'drystep[ui]'")) from None
    from sim.scenario.text.document import read_text
    from sim.web.desk import Desk, example
    from sim.web.door import Door
    from sim.web.jobs import Jobs

    text = example(_FIRST) if scenario is None else read_text(Path(scenario), scenario)
    base = Path() if scenario is None else Path(scenario).parent
    with (_listen(port) as listening,
          tempfile.TemporaryDirectory(prefix="drystep-", ignore_cleanup_errors=True) as reports):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for every picture
        jobs, door = Jobs(Desk(Path(reports), base)), Door()
        number = listening.getsockname()[1]
        app = make_app(jobs, text, door)
        server = make_server(_HERE, number, app, threaded=True, fd=listening.fileno())
        address = f"http://{_HERE}:{number}/?token="
        click.echo(f"{address}{door.token}  (Ctrl-C ends it)", err=True)
        if not no_browser:
            click.launch(address + door.ticket())
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: the reports' folder goes too
            server.serve_forever()
        except KeyboardInterrupt:  # before it served
            pass
        finally:
            server.server_close()
            jobs.close()
        click.echo("", err=True)


def _listen(port: int) -> socket.socket:
    """A socket that listens; werkzeug's own would print what is wrong in its words."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((_HERE, port))
        listening.listen()
    except OSError as error:
        listening.close()
        why, hint = {
            errno.EADDRINUSE: ("is taken", "name another; 0 takes a free one"),
            errno.EACCES: ("is not open to you: those below 1024 are the system's", "name one from 1024 on"),
        }.get(error.errno or 0, (f"cannot be used: {error.strerror}", "0 takes a free one"))
        raise UserError(Fault(f"port {port} {why}", "--port", hint=hint)) from None
    return listening


COMMANDS = (ui,)
