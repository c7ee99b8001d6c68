"""Whether two directories hold the same model."""

from __future__ import annotations

from pathlib import Path

from roll.models.fingerprint import compute_model_fingerprint


def test_model_fingerprint_a_change_of_some_matrices_alone_is_seen(tmp_path: Path) -> None:
    """As adapters that were merged into them leave a model: its first and last tensors are what they were."""
    content = bytearray(6 << 20)
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    seen = set()
    for begin in (0, 3 << 20, (6 << 20) - 1, 2 << 20):  # 50 kB in the midst
        for place in range(begin, min(begin + 50_000, len(content))):
            content[place] ^= 1
        weights.write_bytes(content)
        seen.add(compute_model_fingerprint(tmp_path))
        assert compute_model_fingerprint(tmp_path) in seen
    assert len(seen) == 4


def test_model_fingerprint_the_settings_of_an_image_processor_are_seen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    seen = {compute_model_fingerprint(tmp_path)}
    for name in ("preprocessor_config.json", "processor_config.json"):
        for setting in ("true", "false"):
            (tmp_path / name).write_text(f'{{"do_normalize": {setting}}}')
            seen.add(compute_model_fingerprint(tmp_path))
    assert len(seen) == 5
