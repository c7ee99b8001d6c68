"""Engines by name, and what each can do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.engines import (
    ENGINES,
    EngineCapabilities,
    EngineRequirement,
    LazyEngine,
    check_engine,
    check_engine_options,
    check_lora_rank,
    get_engine_capabilities,
    list_engines_with,
    resolve_engine_kind,
)
from roll.config.inference import InferenceConfig
from roll.config.load import load_config
from roll.errors import ConfigError

NOWHERE = LazyEngine(
    path="nowhere:Engine",
    capabilities=EngineCapabilities(lora=True, can_sleep=True),
    library="a_library_that_nobody_has",
    install="pip install nowhere",
)
SLEEPER = LazyEngine(path="nowhere:Sleeper", capabilities=EngineCapabilities(can_sleep=True))
WRONG = lambda spec: spec  # noqa: E731
WRONG.capabilities = {"can_sleep": True}  # type: ignore[attr-defined]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine is a package and one line of the registry."""
    lines = {"nowhere": f"{__name__}:NOWHERE", "sleeper": f"{__name__}:SLEEPER"}
    monkeypatch.setattr(ENGINES, "_entries", {**ENGINES._entries, **lines})


def test_config_engines_are_described_without_importing_torch_ray_or_vllm() -> None:
    code = (
        "import sys\n"
        "from roll.config.engines import ENGINES, get_engine_capabilities\n"
        "assert get_engine_capabilities('hf').can_sleep and get_engine_capabilities('vllm').tensor_parallel\n"
        "assert not get_engine_capabilities('sglang').truncates_sampling\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers', 'roll.inference.hf'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_engines_that_are_registered_need_no_other_change(registered: None) -> None:
    assert InferenceConfig(engine="sleeper").engine == "sleeper"
    assert resolve_engine_kind("sleeper") == "sleeper"
    assert list_engines_with("lora") == ["vllm", "hf", "sglang", "nowhere"]
    check_engine("sleeper", [EngineRequirement(capability="can_sleep", reason="a test")])


def test_config_engines_whose_library_is_missing_say_how_to_install_it(registered: None) -> None:
    instead = resolve_engine_kind("auto")
    with pytest.raises(ConfigError) as caught:
        resolve_engine_kind("nowhere", "judge.engine")
    assert str(caught.value) == (
        "judge.engine is nowhere, but a_library_that_nobody_has is not installed: pip install nowhere, or set "
        f"judge.engine={instead}."
    )


def test_config_engines_that_lack_a_capability_are_named_with_those_that_have_it(registered: None) -> None:
    with pytest.raises(ConfigError) as caught:
        check_engine("sleeper", [EngineRequirement(capability="lora", reason="an adapter", alternative="merge it")])
    assert str(caught.value) == (
        "an adapter requires an engine that can generate with LoRA adapters (lora), but inference.engine is sleeper: set "  # noqa: E501
        "inference.engine to vllm or hf or sglang or nowhere, or merge it."
    )
    with pytest.raises(ConfigError, match=r"is sleeper\. No installed engine has this capability\.$"):
        check_engine("sleeper", [EngineRequirement(capability="supports_images", reason="a picture")])


def test_config_engines_of_a_file_without_capabilities_have_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent_engine.py").write_text("class Silent:\n    def __init__(self, spec):\n        pass\n")
    monkeypatch.chdir(tmp_path)
    assert get_engine_capabilities("silent_engine.py:Silent") == EngineCapabilities()


def test_config_engines_whose_capabilities_are_no_capabilities_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be of type roll\.inference\.EngineCapabilities, got dict"):
        get_engine_capabilities(f"{__name__}:WRONG")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "class E:\n    def __init__(self, spec): pass\n    def close(self): pass",
            r"E' does not define start, generate, .*, load:",
        ),
        ("class E: pass", r"is called with \(spec\), which \(\) does not accept"),
        (
            "from roll.inference import EngineCapabilities\nclass E:\n"
            "    capabilities = EngineCapabilities(can_sleep='no')",
            r"can_sleep of the engine .* must be True or False, got 'no'",
        ),
    ],
)
def test_config_engines_of_a_file_that_are_no_engines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    (tmp_path / "no_engine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        check_engine("no_engine.py:E", [])


def test_config_engines_that_are_unknown_are_refused_at_load_with_the_nearest() -> None:
    quickstart = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
    with pytest.raises(ConfigError, match=r"inference\.engine.*unknown inference engine 'vlm'\. Did you mean 'vllm'"):
        load_config(quickstart, ["inference.engine=vlm"])


def test_config_engines_limit_the_rank_of_adapters() -> None:
    check_lora_rank("hf", 4096, "model.lora.rank")
    if not ENGINES.get("vllm").is_installed:  # type: ignore[attr-defined]
        pytest.skip("vLLM is not installed")
    check_lora_rank("vllm", 512, "--max-rank")
    with pytest.raises(
        ConfigError, match=r"^--max-rank is 513, but the engine vllm supports .* up to rank 512: lower it\.$"
    ):
        check_lora_rank("vllm", 513, "--max-rank")


def test_config_engines_sglang_needs_a_python_or_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_engine_options("sglang", {"url": "http://10.0.0.5:30000"})
    check_engine_options("sglang", {"python": sys.executable})
    for options, message in (
        ({}, "sglang is not installed: install it in an environment of its own .* set inference.options.python"),
        ({"python": "/nowhere/python"}, "inference.options.python is '/nowhere/python', which cannot be executed"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_engine_options("sglang", options)
