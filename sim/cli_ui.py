"""`drystep ui`: the local page."""

from __future__ import annotations

import logging
import signal
import tempfile
from pathlib import Path

import click

from sim.cli_output import examples
from sim.errors import Fault, UserError

_FIRST = "llama2-7b-fsdp"


@click.command(short_help="Open the local page: edit, predict, compare.", epilog=examples(
    "drystep ui", "drystep ui scenario.yaml --port 9000 --no-browser"))
@click.argument("scenario", required=False)
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True,
              help="Of this machine; 0 takes a free one.")
@click.option("--no-browser", is_flag=True, help="Say the address and open nothing.")
def ui(scenario: str | None, port: int, no_browser: bool) -> None:
    """Open a page on this machine: a scenario in an editor, its prediction beside it, any two side by side.

    It is served to this machine alone (127.0.0.1), until Ctrl-C or SIGTERM. Needs pip install 'drystep[ui]'.
    """
    try:
        from werkzeug.serving import make_server

        from sim.web.app import make_app
    except ImportError:
        raise UserError(Fault("the page needs Flask", "ui", hint="pip install 'drystep[ui]'")) from None
    from sim.scenario.document import read_text
    from sim.web.desk import Desk, example

    text = example(_FIRST) if scenario is None else read_text(Path(scenario), scenario)
    base = Path() if scenario is None else Path(scenario).parent
    with tempfile.TemporaryDirectory(prefix="drystep-") as reports:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for every picture
        app = make_app(Desk(Path(reports), base), text)
        try:
            server = make_server("127.0.0.1", port, app, threaded=True)
        except (OSError, SystemExit):
            raise UserError(Fault(f"port {port} is taken", "--port", hint="name another; 0 takes a free one")) from None
        address = f"http://127.0.0.1:{server.server_port}/"
        click.echo(f"{address}  (Ctrl-C ends it)", err=True)
        if not no_browser:
            click.launch(address)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: the reports' folder goes too
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("", err=True)
        finally:
            server.server_close()


COMMANDS = (ui,)
