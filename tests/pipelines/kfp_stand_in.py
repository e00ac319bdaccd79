"""An HTTP server that speaks the Kubeflow Pipelines v2beta1 calls that we use.

As the real one: 64-bit numbers are strings, empty lists are left out, lists are paged, a recurring
run cannot be changed except by enabling and disabling it.
"""

import email
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

PAGE = 2
ROUTE = re.compile(r"/apis/v2beta1/([a-z_]+)(?:/([^/:]+))?(?:/([a-z]+))?(?::([a-z]+))?$")


class KfpStandIn(ThreadingHTTPServer):
    """State and counters; `calls` are the changing requests in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pipelines, self.versions, self.experiments = {}, {}, {}
        self.recurring, self.runs, self.calls = {}, {}, []
        self.fail_with = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> "KfpStandIn":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def new_id(self, kind: str) -> str:
        """An id nobody has."""
        return f"{kind}-{next(self._numbers)}"


class _Handler(BaseHTTPRequestHandler):
    server: KfpStandIn

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self, method: str) -> None:
        url = urlparse(self.path)
        query = {key: value[0] for key, value in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.fail_with:
            self._answer(self.server.fail_with, {"message": "forbidden by the stand-in"})
            return
        kind, name, sub, verb = ROUTE.match(unquote(url.path)).groups()
        if method != "GET":
            self.server.calls.append(" ".join(filter(None, (method, kind, sub, verb or ""))))
        if kind == "pipelines" and name in ("upload", "upload_version"):
            self._upload(name, query, body)
        elif kind == "pipelines" and sub == "versions":
            found = [item for item in self.server.versions.values() if item["pipeline_id"] == name]
            self._page("pipeline_versions", found, query)
        elif kind == "pipelines":
            self._page("pipelines", list(self.server.pipelines.values()), query)
        elif kind == "experiments":
            self._experiments(method, query, body)
        elif kind == "recurringruns":
            self._recurring(method, name, verb, query, body)
        elif kind == "runs" and method == "POST":
            run = {**json.loads(body), "run_id": self.server.new_id("run")}
            self.server.runs[run["run_id"]] = run
            self._answer(200, run)
        else:
            self._answer(200, {"multi_user": False})

    def _upload(self, name: str, query: dict, body: bytes) -> None:
        header = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        parts = email.message_from_bytes(header + body).get_payload()
        content = parts[0].get_payload(decode=True)
        version = {"display_name": query["name"], "_content": content}
        if name == "upload":
            pipeline = {
                "pipeline_id": self.server.new_id("pipeline"),
                "display_name": query["name"],
            }
            self.server.pipelines[pipeline["pipeline_id"]] = pipeline
            version["pipeline_id"] = pipeline["pipeline_id"]
        else:
            version["pipeline_id"] = query["pipelineid"]
        version["pipeline_version_id"] = self.server.new_id("version")
        self.server.versions[version["pipeline_version_id"]] = version
        self._answer(200, pipeline if name == "upload" else _visible(version))

    def _experiments(self, method: str, query: dict, body: bytes) -> None:
        if method == "POST":
            made = {**json.loads(body), "experiment_id": self.server.new_id("experiment")}
            self.server.experiments[made["experiment_id"]] = made
            self._answer(200, made)
        else:
            self._page("experiments", list(self.server.experiments.values()), query)

    def _recurring(
        self, method: str, name: str | None, verb: str | None, query: dict, body: bytes
    ) -> None:
        there = self.server.recurring
        if method == "POST" and name is None:
            made = {**json.loads(body), "recurring_run_id": self.server.new_id("recurring")}
            made["max_concurrency"] = str(made["max_concurrency"])
            there[made["recurring_run_id"]] = made
            self._answer(200, made)
        elif method == "POST":
            there[name]["mode"] = verb.upper()
            self._answer(200, {})
        elif method == "DELETE":
            del there[name]
            self._answer(200, {})
        else:
            self._page("recurringRuns", list(there.values()), query)

    def _page(self, key: str, items: list[dict], query: dict) -> None:
        if "filter" in query:
            for predicate in json.loads(query["filter"])["predicates"]:
                wanted = predicate.get("stringValue", predicate.get("string_value"))
                items = [item for item in items if item[predicate["key"]] == wanted]
        start = int(query.get("page_token") or 0)
        answer = {}
        if page := [_visible(item) for item in items[start : start + PAGE]]:
            answer[key] = page
        if start + PAGE < len(items):
            answer["next_page_token"] = str(start + PAGE)
        self._answer(200, answer)

    def _answer(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _visible(item: dict) -> dict:
    return {key: value for key, value in item.items() if not key.startswith("_")}
