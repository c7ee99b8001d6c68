"""Set-up hands pip's settings over to uv, which reads none of them."""

import pytest
import uv_settings

LISTING = """\
:env:.cert='/etc/ssl/ca.crt'
:env:.find-links='/wheels /more'
global.cert='/etc/ssl/old.crt'
global.default-timeout='180'
global.extra-index-url='file:///one/simple file:///two/simple'
global.index-url='https://index.example/simple'
install.no-index='true'
freeze.timeout='10'
user.name='nothing of pip'
"""


def test_uv_settings_setup_uv_gets_the_settings_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in uv_settings.VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    assert uv_settings.uv_environment(uv_settings.read_pip_settings(LISTING)) == {
        "SSL_CERT_FILE": "/etc/ssl/ca.crt",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX": "file:///one/simple file:///two/simple",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_NO_INDEX": "true",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_uv_settings_setup_uv_keeps_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    settings = uv_settings.read_pip_settings("global.index-url='https://index.example/simple'")
    assert "UV_DEFAULT_INDEX" not in uv_settings.uv_environment(settings)


def test_uv_settings_setup_uv_reads_a_list_that_pip_writes_in_several_lines() -> None:
    settings = uv_settings.read_pip_settings(r"global.extra-index-url='\nhttps://a/simple\nhttps://b/simple'")
    assert settings == {"extra-index-url": ["https://a/simple", "https://b/simple"]}
