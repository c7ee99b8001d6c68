"""Preferences by name: what each method is made of, what it is refused, and what a reference said is kept."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from roll.algorithms.losses import PreferenceLoss
from roll.algorithms.losses.preference.forms import Sigmoid, Squared
from roll.config.preference import METHODS, PreferenceSection
from roll.errors import ConfigError
from roll.pipelines.learning.losses import preference_loss
from roll.pipelines.preference.kept import KeptLogprobs
from roll.pipelines.preference.objective import with_other_answers
from roll.types import TrainingSample


def sample(draw: int, asked: list[int], answer: list[int]) -> TrainingSample:
    mask = np.array([False] * len(asked) + [True] * len(answer))
    return TrainingSample(
        sample_id=str(draw), unit=draw, token_ids=np.array([*asked, *answer], np.int32), loss_mask=mask
    )


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.compares_pairs])
def test_every_method_is_a_loss_that_needs_a_reference_where_it_says_so(name: str) -> None:
    section = PreferenceSection.model_validate({"type": name})
    loss = preference_loss(section)
    assert loss.against_reference == section.method.uses_reference
    assert loss.needs.whole_units


def test_methods_are_as_their_papers_have_them() -> None:
    def of(**settings: object) -> PreferenceLoss:
        return preference_loss(PreferenceSection.model_validate(settings))

    assert of(type="dpo") == PreferenceLoss(form=Sigmoid(), beta=0.1)
    assert of(type="robust", label_smoothing=0.2).form == Sigmoid(label_smoothing=0.2, robust=True)
    assert of(type="ipo", beta=0.3) == PreferenceLoss(form=Squared(), beta=0.3, scores="mean")
    simpo = of(type="simpo")
    assert (simpo.beta, simpo.margin, simpo.scores, simpo.against_reference) == (2.0, 1.0, "mean", False)
    assert of(type="orpo").likelihood == 1.0


def test_a_setting_that_means_nothing_to_a_method_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"`margin` means nothing to orpo, whose settings are beta, likelihood"):
        PreferenceSection.model_validate({"type": "orpo", "margin": 0.5})
    with pytest.raises(ValidationError, match="simpo needs no reference"):
        PreferenceSection.model_validate({"type": "simpo", "reference_model": "m"})
    with pytest.raises(ConfigError, match=r"preference\.type exo: label_smoothing is 0"):
        preference_loss(PreferenceSection(type="exo", label_smoothing=0.0))


def test_every_prompt_gets_the_answer_before_it() -> None:
    batch = [sample(0, [1, 2], [3]), sample(1, [4], [5, 6]), sample(2, [7, 8, 9], [10])]
    others = with_other_answers(batch, None)
    assert [s.token_ids.tolist() for s in others] == [[1, 2, 10], [4, 3], [7, 8, 9, 5, 6]]
    assert [s.loss_mask.tolist() for s in others] == [[0, 0, 1], [0, 1], [0, 0, 0, 1, 1]]
    assert with_other_answers(batch, 4)[2].token_ids.tolist() == [7, 8, 9, 5]
    assert with_other_answers(batch[:1], None) == ()


def test_what_a_reference_said_is_read_again_and_asked_for_once(tmp_path: Path) -> None:
    first, second, longer = sample(0, [1, 2], [3, 4]), sample(1, [1, 2], [3, 5]), sample(2, [1], [2, 3, 4])
    kept = KeptLogprobs(tmp_path)
    again = sample(7, [1, 2], [3, 4])  # the same tokens in another draw
    assert kept.missing([first, again, second]) == [again, second]
    kept.add([first, longer], [np.array([0, 0, -1, -2.5], np.float32), np.array([0, -3, -4, -5], np.float32)])
    kept.add([second], [np.array([9, 9, -6, -7], np.float32)])
    read = KeptLogprobs(tmp_path)
    assert read.missing([first, again, second, longer]) == []
    assert read.of(again).tolist() == [0, 0, -1, -2.5]
    assert read.of(longer).tolist() == [0, -3, -4, -5]  # the same tokens, of which others count
    assert read.of(second).tolist() == [0, 0, -6, -7]


def test_a_damaged_file_is_asked_for_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = sample(0, [1], [2]), sample(1, [1], [3])
    kept = KeptLogprobs(tmp_path)
    kept.add([one], [np.array([0, -1], np.float32)])
    kept.add([other], [np.array([0, -2], np.float32)])
    (tmp_path / "part-000000.npz").write_bytes(b"PK nothing")
    read = KeptLogprobs(tmp_path)
    assert read.missing([one, other]) == [one]
    assert "computed again" in caplog.text
    read.add([one], [np.array([0, -1], np.float32)])
    assert KeptLogprobs(tmp_path).missing([one, other]) == []


def test_whatever_happened_to_a_file_is_never_believed(tmp_path: Path) -> None:
    one, said = sample(0, [1], [2, 3]), [0.0, -1.0, -2.0]
    KeptLogprobs(tmp_path).add([one], [np.array(said, np.float32)])
    path = tmp_path / "part-000000.npz"
    whole = path.read_bytes()
    damaged = [bytes([*whole[:i], whole[i] ^ 1 << i % 8, *whole[i + 1 :]]) for i in range(len(whole))]
    damaged += [whole[:i] for i in range(0, len(whole), 40)]
    with np.load(io.BytesIO(whole)) as archive:
        arrays = dict(archive)
    wrong = [
        {"lengths": arrays["lengths"] + 1},
        {"lengths": -arrays["lengths"]},
        {"lengths": arrays["lengths"].astype(float)},
        {"keys": np.array(3, np.uint8)},
        {"logprobs": arrays["logprobs"] * np.nan},
        {"logprobs": arrays["logprobs"].astype(str)},
        {"logprobs": arrays["logprobs"][:0]},
    ]
    for changes in wrong:
        np.savez(path, **(arrays | changes))
        damaged.append(path.read_bytes())
    np.save(tmp_path / "array.npy", arrays["keys"])
    damaged.append((tmp_path / "array.npy").read_bytes())
    for content in damaged:
        path.write_bytes(content)
        read = KeptLogprobs(tmp_path)
        assert read.missing([one]) or read.of(one).tolist() == said  # some bytes of an archive say nothing
    path.write_bytes(whole)
    (tmp_path / "part-copy.npz").write_bytes(whole)
    assert KeptLogprobs(tmp_path).missing([one]) == []
