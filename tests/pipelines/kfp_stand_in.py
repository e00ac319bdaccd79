"""An HTTP server that answers as the multi-user Kubeflow Pipelines 2.17 was seen to answer.

| call | answer |
|---|---|
| list pipelines without a namespace | the shared ones, never those of a namespace |
| list experiments or recurring runs without a namespace | 400 |
| a second pipeline, or version of it, by the name of the first | 409 |
| upload a pipeline | a pipeline, and a version that bears the pipeline's name |
| a run of a version that another namespace holds | 403 |
| an argument unknown, missing, or of another type (a struct is an object) | 400 |
| a recurring run | is enabled, disabled, deleted, never edited; 64-bit numbers are strings |
| a version's tags | 63 characters for a key or a value, else 400 |
| any list | pages; an empty one has no items at all |
| `tick`: a recurring run without catch-up that is late | runs the latest missed slot at once |
| `workflow`: what Argo runs | has the controller's retry and time to live, if silent on them |
"""

import email
import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

import yaml
from croniter import croniter

PAGE = 2
ROUTE = re.compile(r"/apis/v2beta1/([a-z_]+)(?:/([^/:]+))?(?:/([a-z]+))?(?::([a-z]+))?$")
ARGO_DEFAULTS = {
    "ttlStrategy": {"secondsAfterSuccess": 3600, "secondsAfterFailure": 3600},
    "templateDefaults": {"retryStrategy": {"limit": "2", "retryPolicy": "OnError"}},
}
"""`workflowDefaults` of the workflow controller, as Kubeflow ships it."""
TYPES = {
    "STRING": str,
    "NUMBER_INTEGER": (int, float),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": bool,
    "LIST": list,
    "STRUCT": dict,
}


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Fault:
    """Makes one call go wrong: refused, or carried out with its answer lost."""

    at: int
    """Which of the following calls."""
    carried_out: bool = False


class KfpStandIn(ThreadingHTTPServer):
    """State and counters; `calls` are the changing requests in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pipelines, self.versions, self.experiments = {}, {}, {}
        self.recurring, self.runs, self.calls = {}, {}, []
        self.fail_with: int | None = None
        self.fault: Fault | None = None
        self.at_once = 0
        """Most recurring runs of one name and namespace that were ever enabled together."""
        self.lock = threading.Lock()
        self._numbers = itertools.count(1)

    def __enter__(self) -> "KfpStandIn":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def new_id(self, kind: str) -> str:
        """An id nobody has."""
        return f"{kind}-{next(self._numbers)}"

    def enabled(self, namespace: str, name: str) -> list[dict]:
        """Recurring runs of a name that would start runs."""
        return [
            run
            for run in self.recurring.values()
            if (run["namespace"], run["display_name"], run["mode"]) == (namespace, name, "ENABLE")
        ]

    def count(self) -> None:
        """Keeps `at_once`."""
        fires = Counter(
            (run["namespace"], run["display_name"])
            for run in self.recurring.values()
            if run["mode"] == "ENABLE"
        )
        self.at_once = max(self.at_once, *fires.values(), 0)

    def tick(self, now: datetime) -> list[str]:
        """What the scheduler starts now: names of recurring runs, each with its due slot."""
        started = []
        for run in self.recurring.values():
            due = _next_slot(run, now)
            if run["mode"] == "ENABLE" and due is not None and due <= now:
                run["_last"] = due
                started.append(f"{run['display_name']} {due:%Y-%m-%d %H:%M}")
        return started

    def workflow(self, run: dict) -> dict:
        """The specification that Argo carries out, with the controller's defaults merged in."""
        version = self.versions[run["pipeline_version_reference"]["pipeline_version_id"]]
        platform = list(yaml.safe_load_all(version["_content"]))[1]["platforms"]["kubernetes"]
        config = platform.get("pipelineConfig", {})
        ttl = {
            "secondsAfterCompletion": config.get("resourceTtlOnCompletion"),
            "secondsAfterSuccess": config.get("resourceTtlOnSuccess"),
            "secondsAfterFailure": config.get("resourceTtlOnFailure"),
        }
        said = {name: seconds for name, seconds in ttl.items() if seconds}
        return {
            "ttlStrategy": {**ARGO_DEFAULTS["ttlStrategy"], **said},
            "retries": _retries(next(yaml.safe_load_all(version["_content"]))),
        }


def _retries(spec: dict) -> dict[str, int]:
    """Task -> how often Argo starts its pod again: by its own policy, else by the default."""
    default = int(ARGO_DEFAULTS["templateDefaults"]["retryStrategy"]["limit"])
    groups = [spec["root"], *spec["components"].values()]
    return {
        name: task["retryPolicy"].get("maxRetryCount", 0) if "retryPolicy" in task else default
        for group in groups
        if "dag" in group
        for name, task in group["dag"]["tasks"].items()
    }


def time_to_live(workflow: dict, succeeded: bool) -> int:
    """Seconds Argo keeps a finished workflow: the particular time wins over the general one."""
    ttl = workflow["ttlStrategy"]
    particular = ttl.get("secondsAfterSuccess" if succeeded else "secondsAfterFailure")
    return particular or ttl["secondsAfterCompletion"]


def _next_slot(run: dict, now: datetime) -> datetime | None:
    """As `getNextScheduledEpochImp` of Kubeflow's scheduler."""
    cron = run["trigger"]["cron_schedule"]
    start, end = (_moment(cron.get(edge)) for edge in ("start_time", "end_time"))
    last = run.get("_last") or start or run["_created"]
    slots: Iterator[datetime] = croniter(
        cron["cron"], max(last, start or last), second_at_beginning=True, ret_type=datetime
    )
    slot = next(slots)
    if end is not None and slot > end:
        return None
    while run.get("no_catchup"):
        following = next(slots)
        if following > now or (end is not None and following > end):
            break
        slot = following
    return slot


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


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
        with self.server.lock:
            try:
                lost = self._goes_wrong()
                status, value = 200, self._route(method, unquote(url.path), query, body)
                self.server.count()
                if lost:
                    raise Refused(503, "the answer was lost")
            except Refused as refused:
                status, value = refused.status, {"message": refused.message}
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _goes_wrong(self) -> bool:
        if self.server.fail_with:
            raise Refused(self.server.fail_with, "forbidden by the stand-in")
        fault = self.server.fault
        if fault is None:
            return False
        fault.at -= 1
        if fault.at == 0 and not fault.carried_out:
            raise Refused(503, "the call failed")
        return fault.at == 0

    def _route(self, method: str, path: str, query: dict, body: bytes) -> dict:
        kind, name, sub, verb = ROUTE.match(path).groups()
        if method != "GET":
            self.server.calls.append(" ".join(filter(None, (method, kind, sub, verb or ""))))
        if kind == "pipelines":
            return self._pipelines(method, name, sub, query, body)
        if kind == "experiments":
            return self._experiments(method, query, body)
        if kind == "recurringruns":
            return self._recurring(method, name, verb, query, body)
        if kind == "runs" and method == "POST":
            run = self._checked(json.loads(body)) | {"run_id": self.server.new_id("run")}
            self.server.runs[run["run_id"]] = run
            return run
        return {"multi_user": True}

    def _pipelines(
        self, method: str, name: str | None, sub: str | None, query: dict, body: bytes
    ) -> dict:
        if name == "upload":
            pipeline = self._new_pipeline(query["name"], query.get("namespace", ""))
            self._new_version(pipeline["pipeline_id"], query["name"], body)
            return pipeline
        if name == "upload_version":
            tags = json.loads(query.get("tags", "{}"))
            if any(len(word) > 63 for pair in tags.items() for word in pair):
                raise Refused(400, "tags are limited to 63 characters")
            return _visible(self._new_version(query["pipelineid"], query["name"], body, tags))
        if sub == "versions":
            versions = self.server.versions.values()
            found = [item for item in versions if item["pipeline_id"] == name]
            return self._page("pipeline_versions", found, query)
        if method == "POST":
            wanted = json.loads(body)
            return self._new_pipeline(wanted["display_name"], wanted.get("namespace", ""))
        pipelines = self.server.pipelines.values()
        where = query.get("namespace", "")
        found = [item for item in pipelines if item.get("namespace", "") == where]
        return self._page("pipelines", found, query)

    def _new_pipeline(self, name: str, namespace: str) -> dict:
        self._once(self.server.pipelines, display_name=name, namespace=namespace)
        pipeline = {
            "pipeline_id": self.server.new_id("pipeline"),
            "display_name": name,
            "namespace": namespace,
        }
        self.server.pipelines[pipeline["pipeline_id"]] = pipeline
        return pipeline

    def _new_version(
        self, pipeline_id: str, name: str, body: bytes, tags: dict | None = None
    ) -> dict:
        if pipeline_id not in self.server.pipelines:
            raise Refused(404, f"pipeline {pipeline_id} not found")
        self._once(self.server.versions, display_name=name, pipeline_id=pipeline_id)
        header = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        parts = email.message_from_bytes(header + body).get_payload()
        version = {
            "pipeline_id": pipeline_id,
            "pipeline_version_id": self.server.new_id("version"),
            "display_name": name,
            "tags": tags or {},
            "_content": parts[0].get_payload(decode=True),
        }
        self.server.versions[version["pipeline_version_id"]] = version
        return version

    def _experiments(self, method: str, query: dict, body: bytes) -> dict:
        there = self.server.experiments
        if method == "POST":
            made = json.loads(body)
            namespace = _namespace(made)
            self._once(there, display_name=made["display_name"], namespace=namespace)
            made["experiment_id"] = self.server.new_id("experiment")
            there[made["experiment_id"]] = made
            return made
        namespace = _namespace(query)
        found = [item for item in there.values() if item["namespace"] == namespace]
        return self._page("experiments", found, query)

    def _recurring(
        self, method: str, name: str | None, verb: str | None, query: dict, body: bytes
    ) -> dict:
        there = self.server.recurring
        if method == "POST" and name is None:
            made = self._checked(json.loads(body))
            made |= {
                "recurring_run_id": self.server.new_id("recurring"),
                "max_concurrency": str(made["max_concurrency"]),
                "_created": datetime.now().astimezone(),
            }
            if not made.get("no_catchup"):
                made.pop("no_catchup", None)
            there[made["recurring_run_id"]] = made
            return _visible(made)
        if name is not None and name not in there:
            raise Refused(404, f"recurring run {name} not found")
        if method == "POST":
            there[name]["mode"] = verb.upper()
            return {}
        if method == "DELETE":
            del there[name]
            return {}
        namespace = _namespace(query)
        found = [item for item in there.values() if item["namespace"] == namespace]
        return self._page("recurringRuns", found, query)

    def _checked(self, run: dict) -> dict:
        """A run or recurring run whose pipeline is there, may be used, and takes its arguments."""
        experiment = self.server.experiments.get(run["experiment_id"])
        reference = run["pipeline_version_reference"]
        version = self.server.versions.get(reference["pipeline_version_id"])
        if experiment is None or version is None:
            raise Refused(404, "the experiment or the version was not found")
        holder = self.server.pipelines[version["pipeline_id"]]["namespace"]
        if holder not in ("", experiment["namespace"]):
            raise Refused(403, f"no right to the pipelines of {holder}")
        spec = next(yaml.safe_load_all(version["_content"]))
        takes = spec["root"].get("inputDefinitions", {}).get("parameters", {})
        given = run["runtime_config"].get("parameters", {})
        if extra := sorted(set(given) - set(takes)):
            raise Refused(400, f"parameter(s) provided are not required by the pipeline: {extra}")
        for name, parameter in takes.items():
            optional = parameter.get("isOptional") or "defaultValue" in parameter
            if name not in given and not optional:
                raise Refused(400, f"parameter {name} is not optional and has no value")
            if name in given and not isinstance(given[name], TYPES[parameter["parameterType"]]):
                raise Refused(400, f"parameter {name} requires {parameter['parameterType']}")
        return {**run, "namespace": experiment["namespace"]}

    def _once(self, there: dict, **key: str) -> None:
        if any(all(item[name] == key[name] for name in key) for item in there.values()):
            raise Refused(409, f"already exists: {key}")

    def _page(self, key: str, items: list[dict], query: dict) -> dict:
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
        return answer


def _namespace(given: dict) -> str:
    if not given.get("namespace"):
        raise Refused(400, "Invalid input error: a namespace must be specified")
    return given["namespace"]


def _visible(item: dict) -> dict:
    return {key: value for key, value in item.items() if not key.startswith("_")}
