"""An HTTP server that answers as the multi-user Kubeflow Pipelines 2.17 was seen to answer.

It also answers as the Kubernetes API server for the two kinds of objects that Kubeflow makes:
Workflows and ScheduledWorkflows.

| call | answer |
|---|---|
| `/healthz` | whether the installation is multi-user; in a single-user one all is in `kubeflow` |
| a run or recurring run with a description or name above 255 characters | 500, after its \
Workflow or ScheduledWorkflow was created; the list of runs never shows it |
| a pipeline, version or experiment with a name above 128, 127 or 128 characters | 400 |
| list pipelines without a namespace | the shared ones, never those of a namespace |
| list experiments or recurring runs without a namespace | 400 |
| a second pipeline, or version of it, by the name of the first | 409 |
| upload a pipeline | a pipeline, and a version that bears the pipeline's name |
| a run of a version that another namespace holds | 403 |
| an argument unknown, missing, or of another type (a struct is an object) | 400 |
| a recurring run | is enabled, disabled, deleted, never edited; 64-bit numbers are strings |
| any field that is false, 0, empty text or an empty list | is absent, as Go writes it |
| a version's tags | 63 characters for a key or a value, else 400 |
| any list | pages; an empty one has no items at all |
| `tick`: a recurring run without catch-up that is late | runs the latest missed slot at once |
| a run of a recurring run | is named by Kubeflow: its ScheduledWorkflow, the index, a hash |
| a finished Workflow | is deleted by the persistence agent after a day, whatever it says |
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
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import yaml
from croniter import croniter

from fedemb.pipelines.cluster.schedule import MARK

PAGE = 2
LONGEST = 255
"""Characters of a description or name of a run or recurring run: columns of Kubeflow's database."""
LONGEST_NAME = {"pipeline": 128, "version": 127, "experiment": 128}
ROUTE = re.compile(
    r"/apis/v2beta1/([a-z_]+)(?:/([^/:]+))?(?:/([a-z]+))?(?:/([^/:]+))?(?::([a-z]+))?$"
)
CLUSTER_ROUTE = re.compile(
    r"/(?:apis/argoproj.io/v1alpha1|apis/kubeflow.org/v1beta1|api/v1)/namespaces/([^/]+)"
    r"/(workflows|scheduledworkflows|configmaps)(?:/([^/]+))?$"
)
KEPT = ("parameters", "pipeline_spec", "data", "labels", "annotations", "tags")
"""Fields that are maps or free JSON, whose values are written as they are."""
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


class Cut(Exception):
    """The connection is closed and nothing is answered."""


@dataclass
class Fault:
    """Makes calls go wrong: refused, or carried out with its answer lost."""

    at: int
    """Which of the following calls."""
    carried_out: bool = False
    cut: bool = False
    """Close the connection instead of answering 503."""
    lasts: bool = False
    """All later calls fail too, and none of them is carried out."""


class KfpStandIn(ThreadingHTTPServer):
    """State and counters; `calls` are the changing requests in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pipelines, self.versions, self.experiments = {}, {}, {}
        self.recurring, self.runs, self.calls = {}, {}, []
        self.workflows: list[dict] = []
        """Workflows of submitted runs, those that no run of the list belongs to among them."""
        self.scheduled_workflows: dict[str, dict] = {}
        """Name -> ScheduledWorkflow."""
        self.multi_user = True
        self.cluster_status = 200
        """What Kubernetes answers; 403: the user may not read Workflows."""
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
        """An unknown id."""
        return f"{kind}-{next(self._numbers)}"

    def kubeconfig(self, path: Path) -> Path:
        """Writes a kubeconfig whose cluster is this server."""
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [{"name": "here", "cluster": {"server": self.url}}],
                    "users": [{"name": "me", "user": {"token": "token"}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                }
            )
        )
        return path

    def enabled(self, namespace: str, name: str) -> list[dict]:
        """Recurring runs of a schedule that would start runs."""
        return [
            run
            for run in self.recurring.values()
            if (schedule_of(run), run["namespace"], run["mode"]) == (name, namespace, "ENABLE")
        ]

    def count(self) -> None:
        """Keeps `at_once`."""
        fires = Counter(
            (run["namespace"], schedule_of(run))
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
                started.append(f"{schedule_of(run)} {due:%Y-%m-%d %H:%M}")
        return started


def schedule_of(run: dict) -> str:
    """The schedule a recurring run belongs to, by its description; else its own name."""
    words = run.get("description", "").split()
    return words[1].rstrip(":") if words[:1] == [MARK] else run["display_name"]


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
                if on_cluster := CLUSTER_ROUTE.match(url.path):
                    status, value = 200, self._on_cluster(method, *on_cluster.groups())
                else:
                    lost = self._goes_wrong()
                    status, value = 200, self._route(method, unquote(url.path), query, body)
                    self.server.count()
                    if lost:
                        self._fail("the answer was lost")
            except Refused as refused:
                status, value = refused.status, {"message": refused.message}
            except Cut:
                self.close_connection = True
                return
        data = json.dumps(_as_go_writes(value)).encode()
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
        if (fault.at == 0 and not fault.carried_out) or (fault.at < 0 and fault.lasts):
            self._fail("the call failed")
        return fault.at == 0

    def _fail(self, message: str) -> None:
        if self.server.fault is not None and self.server.fault.cut:
            raise Cut
        raise Refused(503, message)

    def _on_cluster(self, method: str, namespace: str, kind: str, name: str | None) -> dict:
        """Kubernetes' answer about Workflows or ScheduledWorkflows."""
        if self.server.cluster_status != 200:
            raise Refused(self.server.cluster_status, f"{kind} is forbidden")
        if kind == "configmaps":
            raise Refused(404, f"{kind} {name} not found")
        if kind == "workflows":
            found = self.server.workflows
        else:
            found = list(self.server.scheduled_workflows.values())
        if method == "DELETE" and name is not None:
            if name not in self.server.scheduled_workflows:
                raise Refused(404, f"{kind} {name} not found")
            self.server.calls.append(f"DELETE {kind} {name}")
            del self.server.scheduled_workflows[name]
            return {"status": "Success"}
        return {"items": [item for item in found if item["metadata"]["namespace"] == namespace]}

    def _route(self, method: str, path: str, query: dict, body: bytes) -> dict:
        kind, name, sub, part, verb = ROUTE.match(path).groups()
        if method != "GET":
            self.server.calls.append(" ".join(filter(None, (method, kind, sub, verb or ""))))
        if kind == "pipelines" and part is not None:
            return _with_spec(self.server.versions[part])
        if kind == "pipelines":
            return self._pipelines(method, name, sub, query, body)
        if kind == "experiments":
            return self._experiments(method, query, body)
        if kind == "recurringruns":
            return self._recurring(method, name, verb, query, body)
        if kind == "runs":
            return self._runs(method, name, query, body)
        return {"multi_user": self.server.multi_user}

    def _runs(self, method: str, name: str | None, query: dict, body: bytes) -> dict:
        if name is not None:
            if name not in self.server.runs:
                raise Refused(404, f"run {name} not found")
            return self.server.runs[name]
        if method == "GET":
            namespace = _namespace(query)
            found = [run for run in self.server.runs.values() if run["namespace"] == namespace]
            return self._page("runs", found, query)
        run = self._checked(json.loads(body)) | {"run_id": self.server.new_id("run")}
        self.server.workflows.append(
            {
                "metadata": {
                    "name": f"{self._pipeline_of(run)['display_name']}-{run['run_id']}",
                    "namespace": run["namespace"],
                    "labels": {"pipeline/runid": run["run_id"]},
                    "annotations": {"pipelines.kubeflow.org/run_name": run["display_name"]},
                },
                "status": {"phase": "Running"},
            }
        )
        _store(run, "run_details")
        self.server.runs[run["run_id"]] = run | {"state": "PENDING"}
        return run

    def _pipeline_of(self, run: dict) -> dict:
        return self.server.pipelines[run["pipeline_version_reference"]["pipeline_id"]]

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
            version = self._new_version(query["pipelineid"], query["name"], body, tags)
            version["description"] = query.get("description", "")
            return _visible(version)
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
        _short("pipeline", name)
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
        _short("version", name)
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
            _short("experiment", made["display_name"])
            if not self.server.multi_user:
                made["namespace"] = "kubeflow"
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
            made["_name"] = self._scheduled_workflow(made)
            _store(made, "jobs")
            there[made["recurring_run_id"]] = made
            return _visible(made)
        if name is not None and name not in there:
            raise Refused(404, f"recurring run {name} not found")
        if method == "POST":
            there[name]["mode"] = verb.upper()
            made_of = self.server.scheduled_workflows.get(there[name]["_name"])
            if made_of is not None:
                made_of["spec"]["enabled"] = verb == "enable"
            return {}
        if method == "DELETE":
            self.server.scheduled_workflows.pop(there[name]["_name"], None)
            del there[name]
            return {}
        namespace = _namespace(query)
        found = [item for item in there.values() if item["namespace"] == namespace]
        return self._page("recurringRuns", found, query)

    def _scheduled_workflow(self, made: dict) -> str:
        """Creates the ScheduledWorkflow of a recurring run, named by Kubernetes; its name."""
        prefix = re.sub("[^a-z0-9-]+", "", made["display_name"].lower())[:25]
        name = f"{prefix}{made['recurring_run_id'][-5:]}"
        self.server.scheduled_workflows[name] = {
            "metadata": {
                "name": name,
                "generateName": prefix,
                "namespace": made["namespace"],
                "uid": made["recurring_run_id"],
            },
            "spec": {"enabled": made.get("mode") == "ENABLE"},
        }
        return name

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
                part = predicate["operation"] == "IS_SUBSTRING"
                key_of = predicate["key"]
                items = [
                    item
                    for item in items
                    if item[key_of] == wanted or (part and wanted in item[key_of])
                ]
        start = int(query.get("page_token") or 0)
        answer = {}
        if page := [_visible(item) for item in items[start : start + PAGE]]:
            answer[key] = page
        if start + PAGE < len(items):
            answer["next_page_token"] = str(start + PAGE)
        return answer


def _store(row: dict, table: str) -> None:
    """MariaDB in strict mode, after the object on the cluster was created."""
    for column, field in {"Description": "description", "DisplayName": "display_name"}.items():
        if len(row.get(field) or "") > LONGEST:
            raise Refused(500, f"Data too long for column '{column}' at row 1 ({table})")


def _short(kind: str, name: str) -> None:
    if len(name) > LONGEST_NAME[kind]:
        raise Refused(400, f"{kind} name is longer than {LONGEST_NAME[kind]} characters")


def _namespace(given: dict) -> str:
    if not given.get("namespace"):
        raise Refused(400, "Invalid input error: a namespace must be specified")
    return given["namespace"]


def _with_spec(version: dict) -> dict:
    """A version as it is read alone: with both documents of its package, as JSON."""
    spec, platform = yaml.safe_load_all(version["_content"])
    return _visible(version) | {"pipeline_spec": {"pipeline_spec": spec, "platform_spec": platform}}


def _as_go_writes(value: object) -> object:
    """Leaves out fields with the zero value of their type."""
    if isinstance(value, list):
        return [_as_go_writes(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: found if key in KEPT else _as_go_writes(found)
        for key, found in value.items()
        if key in KEPT or found not in (None, False, 0, "", [])
    }


def _visible(item: dict) -> dict:
    return {key: value for key, value in item.items() if not key.startswith("_")}
