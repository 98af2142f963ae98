"""The page's server: Flask on this machine alone."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, abort, jsonify, request, send_from_directory

from sim.errors import UserError
from sim.scenario.document import MAX_FILE_BYTES
from sim.web.desk import Desk, example, examples, faults_of

#: Names under which a browser on this machine reaches the page; others may come of a page elsewhere that was given our
#: address for its name (DNS rebinding).
_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def make_app(desk: Desk, start: str) -> Flask:
    """The application.

    Args:
        desk: what predicts.
        start: the text that the editor begins with.
    """
    app = Flask("sim.web", static_folder="static", static_url_path="/static")
    app.config["MAX_CONTENT_LENGTH"] = 2 * MAX_FILE_BYTES

    @app.before_request
    def only_here() -> None:
        host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
        if host not in _HOSTS:
            abort(403)

    @app.get("/")
    def page() -> Response:
        return app.send_static_file("page.html")

    @app.get("/start")
    def begin() -> Response:
        return jsonify({"text": start, "examples": examples()})

    @app.get("/example/<name>")
    def shipped(name: str) -> Any:
        return jsonify({"text": example(name)}) if name in examples() else abort(404)

    @app.post("/predict")
    def predict() -> Any:
        asked = request.get_json()
        text, sets = (asked.get("text"), asked.get("sets", [])) if isinstance(asked, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(sets, list) or not all(isinstance(one, str) for one in sets):
            abort(400)
        try:
            return jsonify(desk.predict(text, sets).to_json())
        except UserError as error:
            return jsonify({"faults": faults_of(error)}), 422

    @app.get("/compare/<int:first>/<int:second>")
    def compare(first: int, second: int) -> Any:
        try:
            return jsonify(desk.compare(first, second))
        except KeyError:
            abort(404)

    @app.get("/report/<int:number>/<path:name>")
    def report(number: int, name: str) -> Response:
        return send_from_directory(desk.reports / str(number), name)

    return app
