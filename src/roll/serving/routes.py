"""The paths of the API: the class of each body, and the function that answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel

from roll.serving import requests, wire
from roll.serving.failures import ApiError
from roll.serving.promises import Promise
from roll.serving.service import Service
from roll.serving.submissions import Submission

__all__ = ["ROUTES", "Answer", "Route", "answer"]

Answer: TypeAlias = Mapping[str, Any] | Promise
"""The content of a response, or a promise of it."""


@dataclass(frozen=True, slots=True)
class Route:
    """The body that a POST to a path expects, and the function that answers it."""

    body: type[BaseModel]
    answer: Callable[[Service, str, Any, Submission], Answer]
    """A function of the service, the owner of the key, the parsed body, and the received request."""


def _configure(service: Service, owner: str, request: requests.ClientConfig, submission: Submission) -> Answer:
    return {}  # the clients' defaults


def _create_session(service: Service, owner: str, request: requests.CreateSession, submission: Submission) -> Answer:
    return {"session_id": service.create_session(owner, submission), "type": "create_session"}


def _record_heartbeat(service: Service, owner: str, request: requests.Heartbeat, submission: Submission) -> Answer:
    service.sessions.find(request.session_id, owner)
    return {"type": "session_heartbeat"}


def _get_info(service: Service, owner: str, request: requests.GetInfo, submission: Submission) -> Answer:
    return service.get_info(owner, request.model_id)


def _describe_weights(service: Service, owner: str, request: requests.WeightsInfo, submission: Submission) -> Answer:
    return service.describe_weights(owner, request.tinker_path)


def _create_sampling(
    service: Service, owner: str, request: requests.CreateSamplingSession, submission: Submission
) -> Answer:
    name = service.create_sampling_session(owner, request, submission)
    return {"sampling_session_id": name, "type": "create_sampling_session"}


def _cancel(service: Service, owner: str, request: requests.CancelFuture, submission: Submission) -> Answer:
    service.promises.cancel(service.promises.find(request.request_id, owner))
    return {}


ROUTES: Mapping[str, Route] = {
    "client/config": Route(requests.ClientConfig, _configure),
    "client/dynamic_config": Route(requests.ClientConfig, _configure),
    "create_session": Route(requests.CreateSession, _create_session),
    "session_heartbeat": Route(requests.Heartbeat, _record_heartbeat),
    "create_model": Route(requests.CreateModel, Service.create_model),
    "load_weights": Route(requests.LoadWeights, Service.load_weights),
    "get_info": Route(requests.GetInfo, _get_info),
    "optim_step": Route(requests.OptimStep, Service.optim_step),
    "save_weights": Route(requests.SaveWeights, Service.save_weights),
    "save_weights_for_sampler": Route(requests.SaveWeightsForSampler, Service.save_weights_for_sampler),
    "weights_info": Route(requests.WeightsInfo, _describe_weights),
    "create_sampling_session": Route(requests.CreateSamplingSession, _create_sampling),
    "asample": Route(requests.Sample, Service.sample),
    "cancel_future": Route(requests.CancelFuture, _cancel),
}
"""The routes of POST, by path, except those that `TrainingServer` answers itself: `forward_backward` has a body in
protobuf, `retrieve_future` waits, `sessions/<id>/finish` has an ID in its path, and `telemetry` is ignored.
"""


_ORDERED = frozenset({"optim_step", "save_weights", "save_weights_for_sampler", "load_weights"})
"""The paths of requests with a number in the order of their model. That of `forward_backward` cannot be read if the
body is invalid.
"""


def answer(service: Service, owner: str, submission: Submission) -> Answer:
    """Answer a POST.

    Raises:
        ApiError: The path is not supported, or the request is rejected.
    """
    path, body = submission.path, submission.body
    if path == "forward_backward":
        return service.forward_backward(owner, wire.parse_forward_backward(body), submission)
    if path not in ROUTES:
        raise ApiError(404, f"POST /api/v1/{path[:200]} is not supported by this server.")
    route = ROUTES[path]
    try:
        return route.answer(service, owner, requests.parse_body(route.body, body), submission)
    except ApiError as error:
        if error.status == 400 and path in _ORDERED:
            service.models.note_rejected(owner, submission)
        raise
