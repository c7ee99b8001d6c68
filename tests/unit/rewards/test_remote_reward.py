"""Rewards of an HTTP service: the requests, the retries, and that only a valid result becomes a reward."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError
from unit.rewards.reward_service import RewardService, open_service, score_length, send_raw

from roll.config.rewards import RemoteReward
from roll.errors import ConfigError, MalformedPromptError, RewardInfraError, UnscorableError
from roll.rewards.base import Verifier
from roll.rewards.compose import Component, WeightedReward
from roll.rewards.remote import RemoteScorer
from roll.rewards.reply_cache import ReplyCache
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]


@pytest.fixture
async def service() -> AsyncIterator[RewardService]:
    async with open_service() as service:
        yield service


async def _skip_wait(seconds: float) -> None:
    await asyncio.sleep(0)


def make_config(service: RewardService, **settings: Any) -> RemoteReward:
    return RemoteReward.model_validate({"type": "remote", "url": service.url, **settings})


def make_scorer(service: RewardService, sleep: Any = _skip_wait, **settings: Any) -> RemoteScorer:
    return RemoteScorer(make_config(service, **settings), sleep=sleep, jitter=lambda: 0.5)


def make_reward(service: RewardService, **settings: Any) -> WeightedReward:
    config = make_config(service, **settings)
    scorer = RemoteScorer(config, sleep=_skip_wait)
    verifier = Verifier(judge=scorer.judge, decides_correctness=config.decides, close=scorer.close)
    return WeightedReward([Component(name="remote", config=config, verifier=verifier)])


async def test_remote_reward_scores_answers_in_batches(service: RewardService, rollout: MakeRollout) -> None:
    reward = make_reward(service, batch_size=4, max_concurrent=2)
    texts = ["x" * n for n in range(1, 11)]
    results = await asyncio.gather(*(reward(rollout(text, "ref", metadata={"k": [1]})) for text in texts))
    assert [(r.value, r.correct) for r in results] == [(float(n), n % 2 == 0) for n in range(1, 11)]
    assert max(map(len, service.texts)) == 4 and len(service.texts) <= 4
    assert sorted(text for batch in service.texts for text in batch) == texts
    item = service.bodies[0]["items"][0]
    assert (item["answer"], item["metadata"], item["uid"], item["finished"]) == ("ref", {"k": [1]}, "d/0", True)
    assert item["prompt"] == [{"role": "user", "content": "?"}] and "token_ids" not in item
    await reward.close()


async def test_remote_reward_runs_at_most_max_concurrent_requests(service: RewardService, rollout: MakeRollout) -> None:
    started = asyncio.Event()

    async def wait_for_others(body: dict[str, Any]) -> web.Response:
        if service.num_running == 3:
            started.set()
        await started.wait()
        return score_length(body)

    service.reply = wait_for_others
    scorer = make_scorer(service, batch_size=1, max_concurrent=3)
    await asyncio.gather(*(scorer.judge(rollout("x" * n)) for n in range(1, 21)))
    assert service.max_running == 3 and len(service.bodies) == 20
    await scorer.close()


GARBAGE = {
    "not JSON": "<html>busy</html>",
    "empty": "",
    "another type": "[]",
    "no results": "{}",
    "results of another type": '{"results": {"value": 1}}',
    "too few results": '{"results": []}',
    "too many results": '{"results": [{"value": 1, "correct": true}, {"value": 1, "correct": true}]}',
    "NaN": '{"results": [{"value": NaN, "correct": true}]}',
    "infinity": '{"results": [{"value": Infinity, "correct": true}]}',
    "a number that overflows": '{"results": [{"value": 1e999, "correct": true}]}',
    "a huge integer": '{"results": [{"value": 1' + "0" * 5000 + ', "correct": true}]}',
    "a string as value": '{"results": [{"value": "1", "correct": true}]}',
    "a bool as value": '{"results": [{"value": true, "correct": true}]}',
    "no value": '{"results": [{"correct": true}]}',
    "null as value": '{"results": [{"value": null, "correct": true}]}',
    "a null result": '{"results": [null]}',
    "correct as text": '{"results": [{"value": 1, "correct": "yes"}]}',
    "NaN in parts": '{"results": [{"value": 1, "correct": true, "parts": {"a": NaN}}]}',
    "a control character in a part's name": '{"results": [{"value": 1, "correct": true, "parts": {"a\\u001b": 1}}]}',
    "too many parts": json.dumps(
        {"results": [{"value": 1, "correct": True, "parts": {f"p{i}": 1 for i in range(65)}}]}
    ),
    "deep nesting": '{"results": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "another request's id": '{"id": "zz", "results": [{"value": 1, "correct": true}]}',
    "invalid UTF-8": '{"results": [{"value": 1, "correct": true, "verdict": "\udcff"}]}',
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_remote_reward_an_invalid_reply_is_an_infrastructure_error(
    service: RewardService, rollout: MakeRollout, name: str
) -> None:
    raw = GARBAGE[name].encode("utf-8", "surrogateescape")
    service.reply = lambda _: web.Response(body=raw, content_type="application/json")
    reward = make_reward(service, max_attempts=3)
    with pytest.raises(RewardInfraError, match=r"failed 3 consecutive times; the last error: .*reply"):
        await reward(rollout("answer"))
    assert len(service.bodies) == 3
    service.reply = score_length  # a later attempt of the rollout is scored, so the failure was not cached
    assert (await reward(rollout("answer"))).value == 6.0
    await reward.close()


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408])
async def test_remote_reward_a_failing_service_is_an_infrastructure_error_after_all_attempts(
    service: RewardService, rollout: MakeRollout, status: int
) -> None:
    service.reply = send_raw("overloaded", status)
    scorer = make_scorer(service, max_attempts=4)
    with pytest.raises(RewardInfraError, match=rf"failed 4 consecutive times; the last error: status {status}: overl"):
        await scorer.judge(rollout("a"))
    assert len(service.bodies) == 4
    await scorer.close()


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (400, UnscorableError, "cannot score this answer: status 400"),
        (413, UnscorableError, "cannot score this answer: status 413"),
        (401, ConfigError, "the token is not accepted"),
        (403, ConfigError, "lacks the permission"),
        (404, ConfigError, "the address does not exist"),
        (405, ConfigError, "does not accept POST"),
        (302, ConfigError, "redirected the request"),
        (308, ConfigError, "redirected the request"),
        (204, UnscorableError, "status 204"),
    ],
)
async def test_remote_reward_a_rejected_request_is_not_repeated(
    service: RewardService, rollout: MakeRollout, status: int, error: type[Exception], words: str
) -> None:
    service.reply = send_raw("", status, Location=f"{service.url}/score")
    scorer = make_scorer(service)
    with pytest.raises(error, match=words):
        await scorer.judge(rollout("a"))
    assert len(service.bodies) == 1
    reward = make_reward(service)
    with pytest.raises(UnscorableError):  # in a run, each is an infrastructure error of the rollout
        await reward(rollout("a"))
    await scorer.close()
    await reward.close()


async def test_remote_reward_connections_that_fail_are_infrastructure_errors(
    service: RewardService, rollout: MakeRollout
) -> None:
    async def drop(body: dict[str, Any]) -> web.Response:
        assert service.request is not None and service.request.transport is not None
        service.request.transport.abort()
        return web.Response()

    service.reply = drop
    scorer = make_scorer(service, max_attempts=2)
    with pytest.raises(RewardInfraError, match="failed 2 consecutive times"):
        await scorer.judge(rollout("a"))
    await scorer.close()
    nobody = RemoteScorer(RemoteReward(type="remote", url="http://127.0.0.1:9", max_attempts=2), sleep=_skip_wait)
    with pytest.raises(RewardInfraError, match="failed 2 consecutive times; the last error: Client"):
        await nobody.judge(rollout("a"))
    await nobody.close()


async def test_remote_reward_a_request_that_never_ends_is_bounded_in_time(
    service: RewardService, rollout: MakeRollout
) -> None:
    never = asyncio.Event()

    async def hang(body: dict[str, Any]) -> web.Response:
        await never.wait()
        return web.Response()

    service.reply = hang
    reward = make_reward(service, max_attempts=2, time_limit_s=0.05)
    with pytest.raises(RewardInfraError, match=r"no response within 0\.05 s"):  # never a reward of 0 for a timeout
        await reward(rollout("a"))
    never.set()
    await reward.close()


@pytest.mark.parametrize("compressed", [False, True])
async def test_remote_reward_an_oversized_reply_is_an_infrastructure_error(
    service: RewardService, rollout: MakeRollout, compressed: bool
) -> None:
    body = b" " * 2**24
    headers = {"Content-Encoding": "gzip"} if compressed else {}
    raw = gzip.compress(body) if compressed else body
    service.reply = lambda _: web.Response(body=raw, headers=headers)
    scorer = make_scorer(service, max_attempts=1)
    with pytest.raises(RewardInfraError, match="failed once"):
        await scorer.judge(rollout("a"))
    await scorer.close()


async def test_remote_reward_waits_longer_after_each_failure_and_as_long_as_required(
    service: RewardService, rollout: MakeRollout
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    fail = send_raw("", 500)
    service.script = [
        fail,
        fail,
        send_raw("", 503, **{"Retry-After": "7"}),
        send_raw("", 429, **{"Retry-After": "900"}),
    ]
    scorer = make_scorer(service, sleep, backoff_s=8.0, max_attempts=6)
    assert (await scorer.judge(rollout("a"))).value == 1.0
    assert waits == [4.0, 8.0, 16.0, 60.0]  # half of 8, 16 and 32; the required 900 s are cut to a minute
    await scorer.close()


async def test_remote_reward_an_answer_that_breaks_the_service_fails_alone(
    service: RewardService, rollout: MakeRollout
) -> None:
    def crash_on_poison(body: dict[str, Any]) -> web.Response:
        return web.Response(status=500) if "poison" in str(body) else score_length(body)

    service.reply = crash_on_poison
    scorer = make_scorer(service, max_attempts=3)
    texts = ["a", "poison", "bb", "ccc"]
    results = await asyncio.gather(*(scorer.judge(rollout(text)) for text in texts), return_exceptions=True)
    assert isinstance(results[1], RewardInfraError)
    assert [r.value for r in results if not isinstance(r, BaseException)] == [1.0, 2.0, 3.0]
    assert [len(batch) for batch in service.texts] == [4, 4, 1, 1, 1, 1]
    await scorer.close()


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_remote_reward_a_rejected_answer_does_not_affect_the_others_of_its_batch(
    service: RewardService, rollout: MakeRollout, status: int
) -> None:
    def reject(body: dict[str, Any]) -> web.Response:
        return web.Response(status=status) if "bad" in str(body) else score_length(body)

    service.reply = reject
    scorer = make_scorer(service)
    results = await asyncio.gather(
        *(scorer.judge(rollout(text)) for text in ["a", "bb", "bad!", "ccc", "dddd"]), return_exceptions=True
    )
    assert isinstance(results[2], UnscorableError)
    assert [r.value for r in results if not isinstance(r, BaseException)] == [1.0, 2.0, 3.0, 4.0]
    await scorer.close()


async def test_remote_reward_errors_of_single_answers(service: RewardService, rollout: MakeRollout) -> None:
    kinds = {"a": None, "bb": "infrastructure", "ccc": "unscorable", "dddd": "malformed_prompt"}

    def fail(body: dict[str, Any]) -> web.Response:
        results = [
            {"value": 1.0, "correct": True} if (kind := kinds[i["text"]]) is None else {"error": "oops", "kind": kind}
            for i in body["items"]
        ]
        return web.json_response({"results": results})

    service.reply = fail
    scorer = make_scorer(service)
    found = await asyncio.gather(*(scorer.judge(rollout(text)) for text in kinds), return_exceptions=True)
    assert [type(each).__name__ for each in found] == [
        "Judgement",
        "RewardInfraError",
        "UnscorableError",
        "MalformedPromptError",
    ]
    assert len(service.bodies) == 1  # the service's own error is final; the run decides whether to score again
    await scorer.close()


async def test_remote_reward_equal_answers_are_scored_once(
    service: RewardService, rollout: MakeRollout, tmp_path: Path
) -> None:
    scorer = make_scorer(service, cache_dir=str(tmp_path))
    found = await asyncio.gather(*(scorer.judge(rollout("same", "x")) for _ in range(5)))
    assert {judgement.value for judgement in found} == {4.0} and service.texts == [["same"]]
    await scorer.judge(rollout("same", "x"))
    assert len(service.bodies) == 1
    await scorer.judge(rollout("same", "y"))
    await scorer.judge(rollout("same", "x", metadata={"tests": [1]}))
    assert len(service.bodies) == 3  # another reference, and other metadata, are other requests
    await scorer.close()
    again = make_scorer(service, cache_dir=str(tmp_path))
    assert (await again.judge(rollout("same", "x"))).correct is True
    assert len(service.bodies) == 3
    await again.close()
    fresh = make_scorer(service, cache_size=0)
    for _ in range(2):
        await fresh.judge(rollout("same", "x"))
    assert len(service.bodies) == 5
    await fresh.close()


async def test_remote_reward_timeouts_and_errors_are_not_cached(service: RewardService, rollout: MakeRollout) -> None:
    late = '{"results": [{"value": 0.0, "timed_out": true, "verdict": "timeout"}]}'
    service.script = [send_raw(late), send_raw('{"results": [{"error": "worker died"}]}')]
    reward = make_reward(service)
    first = await reward(rollout("right"))
    assert (first.value, first.correct, first.timed_out) == (0.0, False, ("remote",))
    with pytest.raises(RewardInfraError, match="worker died"):
        await reward(rollout("right"))
    assert (await reward(rollout("right"))).value == 5.0
    await reward.close()


async def test_remote_reward_canceling_one_of_several_equal_answers_keeps_the_request(
    service: RewardService, rollout: MakeRollout
) -> None:
    arrived, go = asyncio.Event(), asyncio.Event()

    async def wait(body: dict[str, Any]) -> web.Response:
        arrived.set()
        await go.wait()
        return score_length(body)

    service.reply = wait
    scorer = make_scorer(service)
    first, second = (asyncio.ensure_future(scorer.judge(rollout("same"))) for _ in range(2))
    await arrived.wait()
    first.cancel()
    go.set()
    assert (await second).value == 4.0 and len(service.bodies) == 1
    await scorer.close()


@pytest.mark.parametrize(
    ("settings", "result", "correct"),
    [
        ({}, {"value": 0.3, "correct": True}, True),
        ({"solved_at": 0.5}, {"value": 0.3, "correct": True}, False),
        ({"solved_at": 0.5}, {"value": 0.5}, True),
        ({"decides": False}, {"value": 0.3, "correct": True}, None),
    ],
)
async def test_remote_reward_who_decides_whether_the_task_was_solved(
    service: RewardService, rollout: MakeRollout, settings: dict[str, Any], result: dict[str, Any], correct: bool | None
) -> None:
    service.reply = send_raw(json.dumps({"results": [result]}))
    reward = make_reward(service, **settings)
    assert (await reward(rollout("a"))).correct is correct
    await reward.close()


async def test_remote_reward_a_result_that_must_decide_but_does_not_names_the_keys(
    service: RewardService, rollout: MakeRollout
) -> None:
    service.reply = send_raw('{"results": [{"value": 1.0}]}')
    reward = make_reward(service)
    with pytest.raises(UnscorableError, match=r"without `correct`: set `solved_at`.*or `decides: false`"):
        await reward(rollout("a"))
    await reward.close()


async def test_remote_reward_the_number_of_metrics_is_bounded(service: RewardService, rollout: MakeRollout) -> None:
    def name_freely(body: dict[str, Any]) -> web.Response:
        n = len(body["items"][0]["text"])
        parts = {f"part-{n}-{i}": 1.0 for i in range(64)}
        return web.json_response({"results": [{"value": 1.0, "correct": True, "parts": parts}]})

    service.reply = name_freely
    scorer = make_scorer(service)
    for n in range(1, 5):
        assert len((await scorer.judge(rollout("x" * n))).parts) == 64
    for n in range(5, 9):
        with pytest.raises(RewardInfraError, match="more than 256 distinct names"):
            await scorer.judge(rollout("x" * n))
    assert len(scorer._part_names) == 256
    scorer._cache = ReplyCache(0)
    assert len((await scorer.judge(rollout("x"))).parts) == 64  # the names that are known are still accepted
    await scorer.close()


@pytest.mark.parametrize("status", [401, 404, 302])
async def test_remote_reward_an_address_that_has_worked_is_tried_again(
    service: RewardService, rollout: MakeRollout, status: int
) -> None:
    scorer = make_scorer(service, max_attempts=3)
    await scorer.judge(rollout("first"))
    replies = [send_raw("starting", status), score_length]
    service.reply = lambda body: replies.pop(0)(body)
    assert (await scorer.judge(rollout("second"))).value == 6.0
    service.reply = send_raw("starting", status)
    with pytest.raises(RewardInfraError, match=rf"failed 3 consecutive times; the last error: status {status}: start"):
        await scorer.judge(rollout("third one"))
    await scorer.close()


@pytest.mark.parametrize("value", [1e300, -1.1e9, 1e10])
async def test_remote_reward_a_value_that_would_overflow_is_an_infrastructure_error(
    service: RewardService, rollout: MakeRollout, value: float
) -> None:
    service.reply = send_raw(json.dumps({"results": [{"value": value, "correct": True}]}))
    reward = make_reward(service)
    with pytest.raises(RewardInfraError, match=r"must be numbers between -1e\+09 and 1e\+09, got value"):
        await reward(rollout("a"))
    await reward.close()


async def test_remote_reward_messages_about_replies_are_short_single_lines(
    service: RewardService, rollout: MakeRollout
) -> None:
    scorer = make_scorer(service, max_attempts=1)
    parts = {"x\n" * 100_000: 1.0}
    service.reply = send_raw(json.dumps({"results": [{"value": 1.0, "correct": True, "parts": parts}]}))
    with pytest.raises(RewardInfraError) as caught:
        await scorer.judge(rollout("a"))
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()
    service.reply = send_raw("line one\n\x1b[31mline two\r\n" * 1000, 500)
    with pytest.raises(RewardInfraError) as caught:
        await scorer.judge(rollout("a"))
    assert "status 500: line one" in str(caught.value)
    assert len(str(caught.value)) < 700 and str(caught.value).isprintable()
    await scorer.close()


async def test_remote_reward_the_cache_holds_only_the_beginning_of_a_verdict(
    service: RewardService, rollout: MakeRollout
) -> None:
    service.reply = send_raw(json.dumps({"results": [{"value": 1.0, "correct": True, "verdict": "v" * 500_000}]}))
    scorer = make_scorer(service)
    first = await scorer.judge(rollout("a"))
    assert await scorer.judge(rollout("a")) == first and first.verdict == "v" * 200 and len(service.bodies) == 1
    assert sum(map(len, scorer._cache._memory.values())) < 1000
    await scorer.close()


async def test_remote_reward_the_token_is_sent_and_never_shown(
    service: RewardService, rollout: MakeRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_REWARD_TOKEN", " very-secret ")
    service.reply = send_raw("bad token: very-secret", 401)
    scorer = make_scorer(service, api_key_env="MY_REWARD_TOKEN")
    with pytest.raises(ConfigError, match="bad token: …"):
        await scorer.judge(rollout("a"))
    assert service.headers[0]["Authorization"] == "Bearer very-secret"
    await scorer.close()


@pytest.mark.parametrize(
    ("value", "words"), [("", "is not set"), ("a\nb", "cannot be sent"), ("ключ", "cannot be sent")]
)
def test_remote_reward_a_token_that_cannot_be_used_is_reported(
    monkeypatch: pytest.MonkeyPatch, value: str, words: str
) -> None:
    monkeypatch.setenv("MY_REWARD_TOKEN", value)
    with pytest.raises(ConfigError, match=f"MY_REWARD_TOKEN.*{words}"):
        RemoteScorer(RemoteReward(type="remote", url="http://h:1", api_key_env="MY_REWARD_TOKEN"))


async def test_remote_reward_columns(service: RewardService, rollout: MakeRollout) -> None:
    rows = rollout("a", metadata={"tests": [1], "image": b"\x00", "level": 3})
    scorer = make_scorer(service)
    with pytest.raises(MalformedPromptError, match=r"cannot be sent as JSON.*metadata_keys"):
        await scorer.judge(rows)
    with pytest.raises(MalformedPromptError, match="cannot be sent as JSON"):
        await scorer.judge(rollout("a", metadata={"x": math.nan}))
    await scorer.close()
    chosen = make_scorer(service, metadata_keys=["tests"], send_token_ids=True)
    await chosen.judge(rows)
    assert service.bodies[-1]["items"][0]["metadata"] == {"tests": [1]}
    assert service.bodies[-1]["items"][0]["token_ids"] == [0]
    await chosen.close()
    absent = make_scorer(service, metadata_keys=["test"])
    with pytest.raises(
        MalformedPromptError,
        match=r"column 'test' of `metadata_keys` does not exist \(columns: 'tests', 'image', 'level'\)",
    ):
        await absent.judge(rows)
    await absent.close()


async def test_remote_reward_text_with_lone_surrogates_is_sent(service: RewardService, rollout: MakeRollout) -> None:
    scorer = make_scorer(service)
    assert (await scorer.judge(rollout("a\ud800 é漢"))).value == 5.0
    assert service.texts == [["a? é漢"]]
    await scorer.close()


async def test_remote_reward_a_large_batch_becomes_several_requests(
    service: RewardService, rollout: MakeRollout
) -> None:
    scorer = make_scorer(service)
    size = 3 * 2**20
    found = await asyncio.gather(*(scorer.judge(rollout(f"{i}" * size)) for i in range(5)))
    assert [judgement.value for judgement in found] == [float(size)] * 5
    assert [len(batch) for batch in service.texts] == [2, 2, 1]
    await scorer.close()


async def test_remote_reward_after_closing_no_answer_waits(service: RewardService, rollout: MakeRollout) -> None:
    arrived = asyncio.Event()

    async def hang(body: dict[str, Any]) -> web.Response:
        arrived.set()
        await asyncio.Event().wait()
        return web.Response()

    service.reply = hang
    scorer = make_scorer(service)
    running = asyncio.ensure_future(scorer.judge(rollout("a")))
    await arrived.wait()
    await scorer.close()
    with pytest.raises((RewardInfraError, asyncio.CancelledError)):
        await running
    with pytest.raises(RewardInfraError, match="is already closed"):
        await scorer.judge(rollout("b"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "host:8600"}, "'host:8600' is not a valid URL: expected, for example, 'http://host:8600'"),
        ({"url": "http://"}, "is not a valid URL"),
        ({"url": "http://host:99999"}, "is not a valid URL"),
        ({"url": "http://host:x"}, "is not a valid URL"),
        ({"url": "http://[::1"}, "is not a valid URL"),
        ({"url": "http://ho st"}, "is not a valid URL"),
        ({"url": "http://host\r\nX: y"}, "is not a valid URL"),
        ({"url": "http://me:secret@host"}, "must not contain a password"),
        ({"url": "http://host?x=1"}, "without query and fragment"),
        ({"url": "http://host", "solved_at": 1.0, "decides": False}, "has no effect"),
        ({"url": "http://host", "cache_size": 0, "cache_dir": "x"}, "requires cache_size > 0"),
        ({"url": "http://host", "batch_size": 0}, "greater than or equal to 1"),
        ({"url": "http://host", "api_key_env": "a b"}, "should match pattern"),
        ({"url": "http://host", "retries": 3}, "Extra inputs"),
    ],
)
def test_remote_reward_settings_that_cannot_work_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words.replace("?", r"\?").replace("[", r"\[")):
        RemoteReward.model_validate({"type": "remote", **settings})
