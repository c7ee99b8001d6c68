"""Print pip's settings as the environment variables by which uv takes the same ones, `NAME=value` a line.

uv reads none of pip's configuration files and none of its `PIP_*` variables. Without them it would ask another index
than pip, for example one whose PyTorch is built for CUDA. Variables of uv that are set already are left alone.
"""

import os
import shlex
import subprocess
import sys

# pip's name of a setting: uv's variable, and what separates several values there.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("HTTPS_PROXY", " "),
}


def read_pip_settings(listing: str) -> dict[str, list[str]]:
    """Return the values of each setting in the output of `pip config list`; variables override files.

    A line reads `global.find-links='/wheels'` or, of a variable, `:env:.find-links='/wheels'`; pip lists its files from
    the weakest to the strongest, and `install.` is the section of one command.
    """
    files: dict[str, list[str]] = {}
    variables: dict[str, list[str]] = {}
    for line in listing.splitlines():
        key, _, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        if name in VARIABLES and section in {":env:", "global", "install"}:
            value = " ".join(shlex.split(quoted)).replace("\\n", " ")
            (variables if section == ":env:" else files)[name] = value.split()
    return {**files, **variables}


def uv_environment(settings: dict[str, list[str]]) -> dict[str, str]:
    """Return uv's variables for pip's settings, without those that the environment sets itself."""
    found = {VARIABLES[name][0]: VARIABLES[name][1].join(values) for name, values in settings.items() if values}
    # pip takes the best version of all indexes, uv by default whatever the first index with the package has.
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if name not in os.environ}


if __name__ == "__main__":
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    for name, value in uv_environment(read_pip_settings(listing)).items():
        print(f"{name}={value}")
