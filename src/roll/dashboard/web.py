"""The web server, which serves the readers' responses as JSON, and the files of the page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
import numpy as np
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from roll.dashboard.access import Access
from roll.dashboard.answers import answer_questions
from roll.dashboard.changes import CpuLimiter, stream_changes
from roll.dashboard.health import build_health, count_causes, find_alarms, read_log, read_newest_ledger
from roll.dashboard.images import ImageSize, Thumbnails, render_png
from roll.dashboard.plans import read_plans
from roll.dashboard.rollout_details import DETAIL_COLUMNS, TOKEN_COLUMNS, build_details, build_token_columns
from roll.dashboard.rollout_queries import Filters, build_rows, count_facets, find_group, query_page, search_texts
from roll.dashboard.rollouts import KINDS, Rollouts, decode_row
from roll.dashboard.run_facts import RunFacts
from roll.dashboard.runs import Run, Runs
from roll.dashboard.settings import find_differences
from roll.errors import RunDirectoryError
from roll.media.stored_images import find_image
from roll.tracking.reading.rollout_files import open_rollout_file

__all__ = ["make_app"]

_MAX_COMPARED_RUNS = 20
"""Maximum number of runs to compare with."""
_MAX_GROUP_CHARACTERS = 2**24
"""Maximum number of characters of a group's answers that a page shows; single rollouts are shown in full."""
_MAX_ARGUMENTS = 100
_MAX_CONCURRENT_DECODES = 2
"""Maximum number of images that are decoded at once."""
_MAX_DIFFED_RUNS = 100
"""Maximum number of runs whose settings are compared."""
STATIC_DIR = Path(__file__).parent / "static"


class _JsonResponse(JSONResponse):
    """A JSON response with `null` for NaN and infinities, and `?` for lone surrogates."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except ValueError:  # NaN, an infinity or a lone surrogate: rare, so most responses are encoded only once
            plain = json.loads(json.dumps(content), parse_constant=lambda _: None)
            return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")


def make_app(
    paths: Sequence[Path], host: str, token: str | None, is_ending: Callable[[], bool] = lambda: False
) -> Access:
    """Build the ASGI application of the dashboard.

    Args:
        paths: run directories, or directories that contain run directories.
        host: address on which the server listens.
        token: required for every request; `None` allows requests from all users of this machine.
        is_ending: returns true when open event streams must end.
    """
    runs = Runs(paths)
    app = FastAPI(
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        default_response_class=_JsonResponse,
        dependencies=[Depends(_reject_repeated_arguments)],
    )
    app.state.runs = runs
    app.state.is_ending = is_ending
    app.state.cpu_limiter = CpuLimiter()
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_invalid_request)
    app.add_exception_handler(RunDirectoryError, _handle_unreadable_run)
    app.add_exception_handler(Exception, _handle_error)
    _add_run_routes(app, runs)
    _add_rollout_routes(app)
    _add_routes_of_one_rollout(app)
    _add_image_routes(app)
    _add_time_routes(app)
    _add_answer_routes(app, runs)
    _add_page_routes(app)
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.methods.add("HEAD")  # the server sends the headers of the GET response
    return Access(app, host, token)


def _reject_repeated_arguments(request: Request) -> None:
    """Reject a request with too many query arguments, or with a repeated argument: only one value would be used."""
    names = [name for name, _ in request.query_params.multi_items()]
    if len(names) > _MAX_ARGUMENTS:
        raise HTTPException(400, f"the request must have at most {_MAX_ARGUMENTS} query arguments.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise HTTPException(400, f"query argument '{twice[:80]}' is repeated: pass it once.")


def _handle_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _JsonResponse({"error": str(error.detail)}, status_code=error.status_code)


def _handle_invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    said = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
    return _JsonResponse({"error": said[:1000]}, status_code=400)


def _handle_unreadable_run(_: Request, error: Exception) -> Response:
    return _JsonResponse({"error": str(error)}, status_code=404)


def _handle_error(_: Request, error: Exception) -> Response:
    return _JsonResponse({"error": f"{type(error).__name__}: {str(error)[:300]}"}, status_code=500)


def _find_run(run: str, request: Request) -> Run:
    try:
        return request.app.state.runs.get(run)
    except KeyError:
        raise HTTPException(404, "the run does not exist, or it was moved or removed.") from None


RunParam = Annotated[Run, Depends(_find_run)]


def _add_run_routes(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    def list_runs() -> Any:
        return [run.build_overview() for run in runs.list_runs()]

    @app.get("/api/diff")
    def get_differences(request: Request, runs: str) -> Any:
        wanted = [run for run in runs.split(",") if run]
        if len(wanted) > _MAX_DIFFED_RUNS:
            raise HTTPException(400, f"at most {_MAX_DIFFED_RUNS} runs can be compared at once, got {len(wanted)}.")
        found = [_find_run(run, request) for run in wanted]
        for run in found:
            run.settings.refresh()
        return {"keys": find_differences([run.settings.values for run in found])}

    @app.get("/api/runs/{run}/metrics")
    def get_metrics(run: RunParam) -> Any:
        with run.lock:
            run.refresh()
            return run.metrics.build_overview() | {"problem": run.metrics.problem or None}

    @app.get("/api/runs/{run}/series")
    def get_series(run: RunParam, names: str, kind: str = "train", since: int | None = None, full: bool = False) -> Any:
        with run.lock:
            run.refresh()
            if kind not in run.metrics.tables:
                raise HTTPException(
                    400, f"unknown kind '{kind[:80]}'; expected one of {', '.join(run.metrics.tables)}."
                )
            return run.metrics.build_series([name for name in names.split(",") if name], kind, since, full=full)

    @app.get("/api/runs/{run}/config")
    def get_config(run: RunParam) -> Any:
        with run.lock:
            settings = run.settings
            settings.refresh()
            return {
                "text": settings.text,
                "values": settings.values,
                "history": settings.history,
                "problem": settings.problem or None,
            }


def _add_rollout_routes(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/rollouts")
    def list_rollouts(
        run: RunParam,
        filters: Annotated[Filters, Depends(_read_filters)],
        sort: str = "row",
        desc: bool = False,
        offset: Annotated[int, Query(ge=0, le=2**40)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
        q: Annotated[str, Query(max_length=1000)] = "",
        cursor: str = "",
    ) -> Any:
        with run.use_index() as (index, progress):
            if q:
                return search_texts(run.run_dir, index, filters, q, cursor) | progress
            try:
                return query_page(index, filters, sort=sort, descending=desc, offset=offset, limit=limit) | progress
            except KeyError:
                raise HTTPException(400, f"rollouts cannot be sorted by '{sort[:80]}'.") from None

    @app.get("/api/runs/{run}/facets")
    def get_facets(run: RunParam) -> Any:
        with run.use_index() as (index, progress):
            return count_facets(index) | progress


def _add_routes_of_one_rollout(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/rollouts/{row}")
    def get_rollout(run: RunParam, row: int) -> Any:
        with run.use_index() as (index, _):
            found = build_rows(index, np.array([_find_position(index, row)]))[0]
            return found | build_details(_read_row(run, row, DETAIL_COLUMNS), run.load_vocabulary(), run.run_dir)

    @app.get("/api/runs/{run}/rollouts/{row}/group")
    def get_group(run: RunParam, row: int) -> Any:
        with run.use_index() as (index, _):
            _find_position(index, row)
            rows = build_rows(index, find_group(index, row))
            name = decode_row(row)[0]
            places = [decode_row(one["row"])[1] for one in rows]
            with open_rollout_file(run.run_dir, name) as file:
                cut = file.read_excerpts(places, "text", _MAX_GROUP_CHARACTERS // len(rows))
            return {"rows": [one | {"text": text} for one, text in zip(rows, cut, strict=True)]}

    @app.get("/api/runs/{run}/rollouts/{row}/tokens")
    def get_token_columns(run: RunParam, row: int) -> Any:
        with run.use_index() as (index, _):
            place = _find_position(index, row)
            kind = KINDS[int(index.get_column("kind")[place])]
            found = _read_row(run, row, TOKEN_COLUMNS)
            return build_token_columns(found, run.settings.values | {"kind": kind}, run.load_vocabulary())


def _add_image_routes(app: FastAPI) -> None:
    # Few images at once: an image may take 200 MiB while it is decoded.
    limiter, thumbnails = anyio.CapacityLimiter(_MAX_CONCURRENT_DECODES), Thumbnails()

    @app.get("/api/runs/{run}/images/{digest}")
    async def get_image(run: RunParam, digest: str, request: Request, size: ImageSize = "full") -> Response:
        whole = (await anyio.to_thread.run_sync(find_image, run.run_dir, digest)).digest
        # A prefix of a digest may match another image later; a whole digest always names the same image.
        lasting = "private, max-age=31536000, immutable" if whole == digest else "no-cache"
        headers = {
            "Cache-Control": lasting,
            "ETag": f'"{whole}-{size}"',
            "Content-Disposition": f'inline; filename="{whole[:12]}.png"',
        }
        if request.method == "HEAD":
            return Response(media_type="image/png", headers=headers)
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        if size == "thumbnail":
            content = await anyio.to_thread.run_sync(thumbnails.render, run.run_dir, whole, limiter=limiter)
        else:
            content = await anyio.to_thread.run_sync(render_png, run.run_dir, whole, size, limiter=limiter)
        return Response(content, media_type="image/png", headers=headers)


def _find_position(index: Rollouts, row: int) -> int:
    try:
        return index.find_position(row)
    except KeyError:
        raise HTTPException(404, f"rollout {row} does not exist in this run, or was removed.") from None


def _read_row(run: Run, row: int, columns: Sequence[str]) -> dict[str, Any]:
    name, place = decode_row(row)
    with open_rollout_file(run.run_dir, name) as file:
        return file.read_rows([place], columns)[0]


def _add_time_routes(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/trace/lanes")
    def get_lanes(
        run: RunParam,
        from_s: float | None = None,
        to_s: float | None = None,
        max: Annotated[int, Query(ge=1, le=20_000)] = 4000,
    ) -> Any:
        with run.use_trace() as (trace, progress):
            return trace.build_lanes(from_s, to_s, max) | progress

    @app.get("/api/runs/{run}/trace/steps")
    def get_steps(run: RunParam) -> Any:
        with run.use_trace() as (trace, _):
            return trace.build_steps()

    @app.get("/api/runs/{run}/health")
    def get_health(run: RunParam) -> Any:
        with run.use_index() as (index, progress):
            patience = int(run.settings.get_number("alarms.patience") or 1)
            return build_health(run.run_dir, run.metrics, index, patience) | progress

    @app.get("/api/runs/{run}/plan")
    def get_plans(run: RunParam) -> Any:
        return read_plans(run.run_dir, run.display_path)

    @app.get("/api/runs/{run}/events")
    async def stream_events(run: RunParam, request: Request) -> Any:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        state = request.app.state
        events = stream_changes(run, state.cpu_limiter, state.is_ending)
        return StreamingResponse(events, media_type="text/event-stream")


def _add_answer_routes(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{run}/answers")
    def get_answers(run: RunParam) -> Any:
        others = []
        for other in (one for one in runs.list_runs()[:_MAX_COMPARED_RUNS] if one.id != run.id):
            other.settings.refresh()
            run.settings.refresh()
            others.append((other.id, other.name, len(find_differences([run.settings.values, other.settings.values]))))
        with run.use_trace() as (trace, _):
            steps = trace.build_steps()
        status = run.build_overview()["status"]
        with run.use_index() as (index, progress):
            log = read_log(run.run_dir)
            patience = int(run.settings.get_number("alarms.patience") or 1)
            facts = RunFacts(
                run=run.id,
                status=status,
                num_steps=run.read_num_steps(),
                settings=run.settings.values,
                train=run.metrics.tables["train"],
                evaluation=run.metrics.tables["eval"],
                rollouts=index,
                ledger=read_newest_ledger(run.run_dir),
                alarms=find_alarms(run.metrics, index, log, patience),
                log=log,
                steps=steps,
                plans=read_plans(run.run_dir, run.display_path).get("items", []),
                others=others,
                files_left=progress.get("indexing", {}).get("files_left", 0),
                failures=count_causes(run.run_dir, index),
                summary=run.read_summary(),
            )
            return {"answers": answer_questions(facts)} | progress


def _read_filters(
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
    min_values = {"step": step_min, "reward": reward_min, "num_tokens": tokens_min, "staleness": staleness_min}
    max_values = {"step": step_max, "reward": reward_max, "num_tokens": tokens_max, "staleness": staleness_max}
    labels = {
        "domain": domain,
        "verdict": verdict,
        "status": status,
        "finish_reason": finish_reason,
        "engine_id": engine_id,
    }
    if kind and kind not in KINDS:
        raise HTTPException(400, f"unknown kind '{kind[:80]}'; expected one of {', '.join(KINDS)}.")
    return Filters(
        min_values={name: bound for name, bound in min_values.items() if bound is not None and math.isfinite(bound)},
        max_values={name: bound for name, bound in max_values.items() if bound is not None and math.isfinite(bound)},
        labels={name: text for name, text in labels.items() if text is not None},
        kind=kind,
        correct=correct,
        trained=trained,
        draw_id=draw_id,
    )


def _add_page_routes(app: FastAPI) -> None:
    @app.get("/")
    def get_page() -> Response:
        path = STATIC_DIR / "index.html"
        if path.is_file():
            return FileResponse(path)
        return PlainTextResponse("The page is not part of this package; /api/runs is available.", status_code=404)

    if STATIC_DIR.is_dir():
        app.mount("/static", StaticFiles(directory=STATIC_DIR))
