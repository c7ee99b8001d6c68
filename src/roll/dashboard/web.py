"""The web server: the readers as JSON, and the page's files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from roll.dashboard.access import Access
from roll.dashboard.answers import answers
from roll.dashboard.changes import Pace, changes
from roll.dashboard.health import alarms, failures, health, log_of, newest_ledger
from roll.dashboard.known import RunFacts
from roll.dashboard.one_rollout import DETAIL_COLUMNS, TOKEN_COLUMNS, details, tokens
from roll.dashboard.plans import plans
from roll.dashboard.questions import Filters, facets, group_of, page, search, table
from roll.dashboard.rollouts import KINDS, Rollouts, file_of
from roll.dashboard.runs import Run, Runs
from roll.dashboard.settings import difference
from roll.errors import RunDirectoryError
from roll.tracking.reading.rollout_files import open_rollout_table

__all__ = ["make_app"]

_MOST_OTHERS = 20
"""Maximum number of runs to compare with."""
_MOST_GROUP_CHARACTERS = 2**24
"""Maximum total length of a group's texts: a page cannot show more, and each rollout can be shown in full by itself."""
_MOST_DIFFERENT = 100
"""Maximum number of runs whose settings are compared."""
STATIC = Path(__file__).parent / "static"


class _Json(JSONResponse):
    """A JSON response with `null` for NaN and infinities, and `?` for lone surrogates."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except ValueError:
            plain = json.loads(json.dumps(content), parse_constant=lambda _: None)
            return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")


def make_app(
    paths: Sequence[Path], host: str, token: str | None, is_ending: Callable[[], bool] = lambda: False
) -> Access:
    """Build the application for the runs at and below `paths`, which streams until `is_ending`; see `Access` for the
    rest.
    """
    runs = Runs(paths)
    app = FastAPI(
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        default_response_class=_Json,
        dependencies=[Depends(_once)],
    )
    app.state.runs = runs
    app.state.is_ending = is_ending
    app.state.pace = Pace()
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RunDirectoryError, _unreadable)
    app.add_exception_handler(Exception, _failed)
    _add_runs(app, runs)
    _add_rollouts(app)
    _add_one_rollout(app)
    _add_time(app)
    _add_answers(app, runs)
    _add_page(app)
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.methods.add("HEAD")  # the server sends the headers of the GET response
    return Access(app, host, token)


def _once(request: Request) -> None:
    """Reject a repeated argument, since only one of its values would be used."""
    names = [name for name, _ in request.query_params.multi_items()]
    twice = next((name for name in names if names.count(name) > 1), None) if len(names) < 100 else names[0]
    if twice is not None:
        raise HTTPException(400, f"'{twice[:80]}' is given more than once, or with too many others: give it once.")


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _Json({"error": str(error.detail)}, status_code=error.status_code)


def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    said = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
    return _Json({"error": said[:1000]}, status_code=400)


def _unreadable(_: Request, error: Exception) -> Response:
    return _Json({"error": str(error)}, status_code=404)


def _failed(_: Request, error: Exception) -> Response:
    return _Json({"error": f"{type(error).__name__}: {str(error)[:300]}"}, status_code=500)


def _run(run: str, request: Request) -> Run:
    try:
        return request.app.state.runs.get(run)
    except KeyError:
        raise HTTPException(404, "there is no such run: it was moved or removed, or never here.") from None


OneRun = Annotated[Run, Depends(_run)]


def _add_runs(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    def list_runs() -> Any:
        return [run.overview() for run in runs.all()]

    @app.get("/api/diff")
    def diff(request: Request, runs: str) -> Any:
        wanted = [run for run in runs.split(",") if run]
        if len(wanted) > _MOST_DIFFERENT:
            raise HTTPException(400, f"at most {_MOST_DIFFERENT} runs are compared at once, not {len(wanted)}.")
        found = [_run(run, request) for run in wanted]
        for run in found:
            run.settings.refresh()
        return {"keys": difference([run.settings.values for run in found])}

    @app.get("/api/runs/{run}/metrics")
    def metrics(run: OneRun) -> Any:
        with run.lock:
            run.refresh()
            return run.metrics.names() | {"problem": run.metrics.problem or None}

    @app.get("/api/runs/{run}/series")
    def series(run: OneRun, names: str, kind: str = "train", since: int | None = None, full: bool = False) -> Any:
        with run.lock:
            run.refresh()
            if kind not in run.metrics.tables:
                raise HTTPException(400, f"kind '{kind[:80]}' is not known: use {' or '.join(run.metrics.tables)}.")
            return run.metrics.series([name for name in names.split(",") if name], kind, since, full=full)

    @app.get("/api/runs/{run}/config")
    def config(run: OneRun) -> Any:
        with run.lock:
            settings = run.settings
            settings.refresh()
            return {
                "text": settings.text,
                "values": settings.values,
                "history": settings.history,
                "problem": settings.problem or None,
            }


def _add_rollouts(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/rollouts")
    def rollouts(
        run: OneRun,
        filters: Annotated[Filters, Depends(_filters)],
        sort: str = "row",
        desc: bool = False,
        offset: Annotated[int, Query(ge=0, le=2**40)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
        q: Annotated[str, Query(max_length=1000)] = "",
        cursor: str = "",
    ) -> Any:
        with run.indexed() as (index, progress):
            if q:
                return search(run.inside, index, filters, q, cursor) | progress
            try:
                return page(index, filters, sort=sort, descending=desc, offset=offset, limit=limit) | progress
            except KeyError:
                raise HTTPException(400, f"rollouts cannot be sorted by '{sort[:80]}'.") from None

    @app.get("/api/runs/{run}/facets")
    def all_facets(run: OneRun) -> Any:
        with run.indexed() as (index, progress):
            return facets(index) | progress


def _add_one_rollout(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/rollouts/{row}")
    def one(run: OneRun, row: int) -> Any:
        with run.indexed() as (index, _):
            shown = table(index, np.array([_position(index, row)]))[0]
            return shown | details(_read(run, row, DETAIL_COLUMNS), run.vocabulary())

    @app.get("/api/runs/{run}/rollouts/{row}/group")
    def group(run: OneRun, row: int) -> Any:
        with run.indexed() as (index, _):
            _position(index, row)
            rows = table(index, group_of(index, row))
            name = file_of(row)[0]
            places = [file_of(one["row"])[1] for one in rows]
            with open_rollout_table(run.inside, name) as file:
                cut = file.beginnings(places, "text", _MOST_GROUP_CHARACTERS // len(rows))
            return {"rows": [one | {"text": text} for one, text in zip(rows, cut, strict=True)]}

    @app.get("/api/runs/{run}/rollouts/{row}/tokens")
    def token_columns(run: OneRun, row: int) -> Any:
        with run.indexed() as (index, _):
            place = _position(index, row)
            kind = KINDS[int(index.column("kind")[place])]
            found = _read(run, row, TOKEN_COLUMNS)
            return tokens(found, run.settings.values | {"kind": kind}, run.vocabulary())


def _position(index: Rollouts, row: int) -> int:
    try:
        return index.position(row)
    except KeyError:
        raise HTTPException(404, f"there is no rollout {row} in this run (now).") from None


def _read(run: Run, row: int, columns: Sequence[str]) -> dict[str, Any]:
    name, place = file_of(row)
    with open_rollout_table(run.inside, name) as file:
        return file.rows([place], columns)[0]


def _add_time(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/trace/lanes")
    def lanes(
        run: OneRun,
        from_s: float | None = None,
        to_s: float | None = None,
        max: Annotated[int, Query(ge=1, le=20_000)] = 4000,
    ) -> Any:
        with run.traced() as (trace, progress):
            return trace.lanes(from_s, to_s, max) | progress

    @app.get("/api/runs/{run}/trace/steps")
    def steps(run: OneRun) -> Any:
        with run.traced() as (trace, _):
            return trace.steps()

    @app.get("/api/runs/{run}/health")
    def all_health(run: OneRun) -> Any:
        with run.indexed() as (index, progress):
            patience = int(run.settings.number_of("alarms.patience") or 1)
            return health(run.inside, run.metrics, index, patience) | progress

    @app.get("/api/runs/{run}/plan")
    def plan(run: OneRun) -> Any:
        return plans(run.inside, run.shown_path)

    @app.get("/api/runs/{run}/events")
    async def events(run: OneRun, request: Request) -> Any:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        state = request.app.state
        return StreamingResponse(changes(run, state.pace, state.is_ending), media_type="text/event-stream")


def _add_answers(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{run}/answers")
    def all_answers(run: OneRun) -> Any:
        others = []
        for other in (one for one in runs.all()[:_MOST_OTHERS] if one.id != run.id):
            other.settings.refresh()
            run.settings.refresh()
            others.append((other.id, other.name, len(difference([run.settings.values, other.settings.values]))))
        with run.traced() as (trace, _):
            steps = trace.steps()
        status = run.overview()["status"]
        with run.indexed() as (index, progress):
            log = log_of(run.inside)
            patience = int(run.settings.number_of("alarms.patience") or 1)
            known = RunFacts(
                run=run.id,
                status=status,
                num_steps=run.num_steps(),
                settings=run.settings.values,
                train=run.metrics.tables["train"],
                evaluation=run.metrics.tables["eval"],
                rollouts=index,
                ledger=newest_ledger(run.inside),
                alarms=alarms(run.metrics, index, log, patience),
                log=log,
                steps=steps,
                plans=plans(run.inside, run.shown_path).get("items", []),
                others=others,
                files_left=progress.get("indexing", {}).get("files_left", 0),
                failures=failures(run.inside, index),
                summary=run.summary(),
            )
            return {"answers": answers(known)} | progress


def _filters(
    step_min: float | None = None,
    step_max: float | None = None,
    reward_min: float | None = None,
    reward_max: float | None = None,
    tokens_min: float | None = None,
    tokens_max: float | None = None,
    staleness_min: float | None = None,
    staleness_max: float | None = None,
    domain: str | None = None,
    verdict: str | None = None,
    status: str | None = None,
    finish_reason: str | None = None,
    engine_id: str | None = None,
    kind: str = "",
    correct: bool | None = None,
    trained: bool | None = None,
    draw_id: int | None = None,
) -> Filters:
    lowest = {"step": step_min, "reward": reward_min, "num_tokens": tokens_min, "staleness": staleness_min}
    highest = {"step": step_max, "reward": reward_max, "num_tokens": tokens_max, "staleness": staleness_max}
    labels = {
        "domain": domain,
        "verdict": verdict,
        "status": status,
        "finish_reason": finish_reason,
        "engine_id": engine_id,
    }
    if kind and kind not in KINDS:
        raise HTTPException(400, f"kind '{kind[:80]}' is not known: use {' or '.join(KINDS)}.")
    return Filters(
        lowest={name: bound for name, bound in lowest.items() if bound is not None and math.isfinite(bound)},
        highest={name: bound for name, bound in highest.items() if bound is not None and math.isfinite(bound)},
        labels={name: text for name, text in labels.items() if text is not None},
        kind=kind,
        correct=correct,
        trained=trained,
        draw_id=draw_id,
    )


def _add_page(app: FastAPI) -> None:
    @app.get("/")
    def index() -> Response:
        path = STATIC / "index.html"
        if path.is_file():
            return FileResponse(path)
        return PlainTextResponse("The page was not built into this package; /api/runs answers.", status_code=404)

    if STATIC.is_dir():
        app.mount("/static", StaticFiles(directory=STATIC))
