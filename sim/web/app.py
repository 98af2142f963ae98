"""The page's server: Flask on this machine alone."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Flask, Response, abort, g, jsonify, request, send_from_directory
from werkzeug.exceptions import HTTPException

from sim.errors import UserError
from sim.scenario.text.document import MAX_FILE_BYTES
from sim.web.desk import example, examples
from sim.web.door import Door
from sim.web.jobs import Jobs, told

#: Names under which a browser on this machine reaches the page; others may come of a page elsewhere that was given our
#: address for its name (DNS rebinding).
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_MOST_SETS = 1000
#: Seconds that a question about a prediction waits for its end.
_PATIENCE_S = 0.4
_TOO_LARGE = "the text is larger than 1 MiB"


def make_app(jobs: Jobs, start: str, door: Door) -> Flask:
    """The application.

    Args:
        jobs: what predicts.
        start: the text that the editor begins with.
        door: whom it answers.
    """
    app = Flask("sim.web", static_folder="static", static_url_path="/static")
    app.config["MAX_CONTENT_LENGTH"] = 3 * MAX_FILE_BYTES  # JSON writes some characters as several
    _guard(app, door)
    _say_what_went_wrong(app)

    @app.get("/")
    def page() -> Response:
        answer = app.send_static_file("page.html")
        if g.newcomer:
            answer.set_cookie(_cookie(), door.token, httponly=True, samesite="Strict")
        return answer

    @app.get("/start")
    def begin() -> Response:
        entries = [one.to_json() for one in list(jobs.desk.entries.values())]
        return jsonify({"text": start, "examples": examples(), "instance": door.instance, "entries": entries})

    @app.get("/example/<name>")
    def shipped(name: str) -> Any:
        return jsonify({"text": example(name)}) if name in examples() else abort(404)

    app.register_blueprint(_of_this_start(jobs, door))
    return app


def _guard(app: Flask, door: Door) -> None:
    """Answers those alone who opened the printed address, and under no strange name."""

    @app.before_request
    def only_here() -> Any:
        if _host_and_port()[0] not in _HOSTS:
            return _refused("this page is served to this machine alone, under the name localhost or 127.0.0.1")
        g.newcomer = request.endpoint == "page" and door.admits(request.args.get("token", ""))
        if not g.newcomer and not door.knows(request.cookies.get(_cookie(), "")):
            return _refused("open the address that drystep ui printed, with its ?token=…: it opens this page")
        return None

    @app.after_request
    def keep_to_itself(answer: Response) -> Response:
        answer.headers["Referrer-Policy"] = "no-referrer"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer


def _say_what_went_wrong(app: Flask) -> None:
    """Every failure is JSON with one sentence."""

    @app.errorhandler(HTTPException)
    def known(error: HTTPException) -> Any:
        said = _TOO_LARGE if error.code == 413 else error.description or error.name
        return jsonify({"error": said}), error.code or 500

    @app.errorhandler(Exception)
    def unknown(error: Exception) -> Any:
        return jsonify({"error": told(error)}), 500


def _of_this_start(jobs: Jobs, door: Door) -> Blueprint:
    """What has numbers that the next start of the server gives out again: refused to pages of another start."""
    own = Blueprint("own", __name__, url_prefix="/<instance>")

    @own.url_value_preprocessor
    def take_instance(endpoint: str | None, values: dict[str, Any] | None) -> None:
        g.instance = (values or {}).pop("instance", "")

    @own.before_request
    def of_this_start() -> None:
        if g.instance != door.instance:
            abort(409, "the server was restarted: reload the page")

    @own.post("/predict")
    def predict() -> Any:
        return jsonify({"job": jobs.start(*_question()).number}), 202

    @own.get("/job/<int:number>")
    def job(number: int) -> Any:
        try:
            found = jobs.find(number)
        except KeyError:
            abort(404, "this prediction is not known any more")
        if found.ended.wait(_PATIENCE_S):
            return jsonify(found.answer), found.code
        return jsonify(jobs.state(found))

    @own.post("/stop/<int:number>")
    def stop(number: int) -> Any:
        try:
            found = jobs.find(number)
        except KeyError:
            abort(404, "this prediction is not known any more")
        found.watch.stop()
        return jsonify(jobs.state(found))

    @own.get("/compare/<int:first>/<int:second>")
    def compare(first: int, second: int) -> Any:
        try:
            return jsonify(jobs.desk.compare(first, second))
        except UserError as error:
            abort(404, str(error))

    @own.get("/report/<path:name>")
    def report(name: str) -> Response:
        return send_from_directory(jobs.desk.reports, name)

    return own


def _question() -> tuple[str, list[str]]:
    """The text and the changes of a request."""
    try:
        asked = request.get_json()
    except RecursionError:
        abort(400, "the question is nested too deep")
    text, sets = (asked.get("text"), asked.get("sets", [])) if isinstance(asked, dict) else (None, None)
    if not isinstance(text, str) or not isinstance(sets, list) or not all(isinstance(one, str) for one in sets):
        abort(400, "the question is not {text, sets}")
    if len(sets) > _MOST_SETS:
        abort(400, f"there are {len(sets):,} lines of changes, more than {_MOST_SETS:,}")
    try:
        size = len("\n".join((text, *sets)).encode())
    except UnicodeEncodeError:
        abort(400, "the text holds half a character (a surrogate without its other half)")
    if size > MAX_FILE_BYTES:
        abort(413)
    return text, sets


def _host_and_port() -> tuple[str, str]:
    host, _, port = request.host.rpartition(":")
    return (host, port) if port.isdigit() else (request.host, "")


def _cookie() -> str:
    """Of one port: browsers give the cookies of a host to all its ports."""
    return f"drystep-{_host_and_port()[1] or 80}"


def _refused(sentence: str) -> Response:
    return Response(f"{sentence}\n", 403, mimetype="text/plain")
