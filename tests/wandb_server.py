"""A W&B server on loopback that knows as much of the protocol as the real client, `wandb sweep` and `wandb agent` use.

It keeps what it is told in memory; `behaviour` makes it refuse or stall instead of answering.
"""

import base64
import contextlib
import gzip
import itertools
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import yaml

from tests.loopback import Handler, serving

ENTITY, PROJECT = "tester", "icl"
HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"
_STREAM = re.compile(r"/files/[^/]+/[^/]+/([^/]+)/file_stream")
_OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")


@attrs.define
class ServedRun:
    """What the server knows of one run."""

    id: str
    created: bool = False
    config: str = "{}"
    sweep: str | None = None
    state: str = "running"
    preempting: bool = False
    command: dict[str, Any] | None = None
    files: dict[str, list[str]] = attrs.field(factory=dict)

    def history(self) -> list[dict[str, Any]]:
        """The rows logged, in order."""
        return [json.loads(line) for line in self.files.get(HISTORY, [])]

    def summary(self) -> str:
        """The last summary, as JSON."""
        return self.files.get(SUMMARY, ["{}"])[-1]

    def told(self) -> dict[str, Any]:
        """The configuration, as plain values."""
        return {key: value["value"] for key, value in json.loads(self.config).items() if key != "_wandb"}


@attrs.define
class WandbServer:
    """`behaviour`: answer; refuse (every request: 403); stall (never answer)."""

    port: int = 0
    behaviour: Literal["answer", "refuse", "stall"] = "answer"
    runs: dict[str, ServedRun] = attrs.field(factory=dict)
    sweeps: list[dict[str, Any]] = attrs.field(factory=list)
    queue: list[dict[str, Any]] = attrs.field(factory=list)
    unknown: list[str] = attrs.field(factory=list)
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    stopping: threading.Event = attrs.field(factory=threading.Event)

    @property
    def environment(self) -> dict[str, str]:
        """What leads the real client here, and nowhere else."""
        return {
            "WANDB_BASE_URL": f"http://127.0.0.1:{self.port}",
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_ENTITY": ENTITY,
            "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.2",  # seconds, not 15
        }

    def stream(self, run_id: str, data: dict[str, Any]) -> None:
        """Take lines of a run's files, and its end."""
        with self.lock:
            run = self.runs.setdefault(run_id, ServedRun(run_id))
            for name, chunk in (data.get("files") or {}).items():
                run.files.setdefault(name, []).extend(chunk["content"])
            run.preempting |= bool(data.get("preempting"))
            if data.get("complete"):
                run.state = "finished" if data["exitcode"] == 0 else "preempted" if run.preempting else "failed"
                run.preempting = False

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The `data` of a GraphQL answer; None for what is not known."""
        match = _OPERATION.search(query)
        operation = match[1] if match else query[:60]
        field = re.search(r"\{\s*(\w+)", query[query.index("{") :])
        with self.lock:
            return self._answer(operation, field[1] if field else "", variables)

    def _answer(self, operation: str, field: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        entity = {"id": _id("entity"), "name": ENTITY}
        project = {"id": _id("project"), "name": PROJECT, "entity": entity}
        if field == "viewer":
            limits = {"cliVersionInfo": {"max_cli_version": "9.9.9"}, "latestLocalVersionInfo": None}
            return {"viewer": _viewer(), "serverInfo": limits}
        if field == "entity":
            return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if operation in ("RunResumeStatus", "RunStatus"):
            return {"model": {**project, "bucket": self._bucket(variables["name"])}}
        if operation == "UpsertBucket":
            run = self.runs.setdefault(variables["name"], ServedRun(variables["name"]))
            inserted, run.created = not run.created, True
            run.config, run.sweep = variables.get("config") or run.config, variables.get("sweep")
            shown = {"displayName": run.id, "description": "", "config": run.config, "sweepName": run.sweep}
            shown |= {"id": _id(run.id), "name": run.id, "historyLineCount": len(run.history()), "project": project}
            return {"upsertBucket": {"bucket": shown, "inserted": inserted}}
        if field == "upsertSweep":
            return {
                "upsertSweep": {"sweep": self._add_sweep(variables["config"], project), "configValidationWarnings": []}
            }
        if field == "createAgent":
            return {"createAgent": {"agent": {"id": _id("agent"), "name": "agent"}}}
        if field == "agentHeartbeat":
            state = variables.get("runState") or "{}"
            commands = json.dumps(self._commands(json.loads(state) if isinstance(state, str) else state))
            agent = {"id": variables.get("id"), "commands": None}
            return {"agentHeartbeat": {"agent": agent, "commands": commands}}
        if field == "createRunFiles":
            files = [{"name": name, "uploadUrl": f"http://127.0.0.1:{self.port}/put"} for name in variables["files"]]
            return {"createRunFiles": {"runID": _id("run"), "uploadHeaders": [], "files": files}}
        if operation == "RunStoppedStatus":
            return {"project": {"run": {"stopped": False}}}
        if field == "upsertModel":
            model = {"id": _id("project"), "name": PROJECT, "entityName": ENTITY, "description": "", "access": ""}
            return {"upsertModel": {"model": model, "project": project, "inserted": False}}
        if field == "project":
            known = {"sweep": self.sweeps[-1] if self.sweeps else None, "run": None}
            return {"project": {**project, "internalId": _id("project"), **known}}
        return None

    def _bucket(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None or not run.created:
            return None
        lines = {"logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(run.history())}
        tails = {"historyTail": json.dumps(run.files.get(HISTORY, [])[-1:]), "eventsTail": "[]"}
        shown = {"id": _id(name), "name": name, "displayName": name, "config": run.config, "tags": []}
        return {**shown, **lines, **tails, "summaryMetrics": run.summary(), "wandbConfig": json.dumps({"t": 1})}

    def _add_sweep(self, config: str, project: dict[str, Any]) -> dict[str, Any]:
        parameters = yaml.safe_load(config)["parameters"]
        name = f"sweep{len(self.sweeps)}"
        for values in itertools.product(*(parameter["values"] for parameter in parameters.values())):
            arguments = {key: {"value": value} for key, value in zip(parameters, values, strict=True)}
            run_id = f"r{len(self.queue):07d}"
            self.queue.append({"type": "run", "run_id": run_id, "program": None, "args": arguments})
        none = {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}
        empty = dict.fromkeys(("bestLoss", "controller", "description", "heartbeatAt", "runCountExpected", "scheduler"))
        sweep = {**empty, "id": _id(name), "name": name, "displayName": name, "state": "RUNNING", "config": config}
        sweep |= {"method": "grid", "runCount": 0, "createdAt": "2026-01-01T00:00:00Z", "updatedAt": None, "user": None}
        sweep |= {"agents": none, "runs": none, "priorRuns": none, "project": project}
        self.sweeps.append(sweep)
        return sweep

    def _commands(self, running: dict[str, Any]) -> list[dict[str, Any]]:
        """One run at a time for each agent: first those that were preempted, as the hosted service has it."""
        if any(running.values()):
            return []
        for run in self.runs.values():
            if run.state == "preempted" and run.command:
                run.state = "running"
                return [run.command]
        if not self.queue:
            return [{"type": "exit"}]
        command = self.queue.pop(0)
        self.runs[command["run_id"]] = ServedRun(command["run_id"], command=command)
        return [command]


class _Answering(Handler):
    state: WandbServer

    def serve(self) -> None:
        body, state = self.body(), self.state
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if state.behaviour == "stall":
            state.stopping.wait()
            self.close_connection = True
            return
        if state.behaviour == "refuse":
            self._tell({"errors": [{"message": "permission denied"}]}, 403)
            return
        stream = _STREAM.search(self.path)
        if self.path.endswith("/graphql"):
            given = json.loads(body)
            data = state.answer(given["query"], given.get("variables") or {})
            if data is None:
                state.unknown.append(given["query"])
            self._tell({"data": data} if data is not None else {"data": None, "errors": [{"message": "unknown"}]})
        elif stream:
            state.stream(stream[1], json.loads(body))
            self._tell({"limits": {}})
        else:
            self._tell({})

    def _tell(self, data: object, status: int = 200) -> None:
        self.reply(status, json.dumps(data).encode())


@contextlib.contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server that runs while inside."""
    served = WandbServer()

    class Answering(_Answering):
        state = served

    with serving(Answering, served.stopping) as served.port:
        yield served


def _id(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _viewer() -> dict[str, Any]:
    known = {"id": _id("viewer"), "entity": ENTITY, "username": ENTITY, "name": ENTITY, "email": "t@example.org"}
    flags: dict[str, Any] = {
        "deletedAt": None,
        "flags": "{}",
        "admin": False,
        "teams": {"edges": []},
        "apiKeys": {"edges": []},
        "__typename": "User",
    }
    return {**known, **flags}
