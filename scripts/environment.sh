# Gives a script its Python environment: .venv in the repository, unless it asks for another one
# with `use_environment FOLDER`. To be sourced by bash scripts.
#
# After `prepare_environment EXTRAS`, $VENV_PYTHON runs p3kv from this repository, with the named
# optional dependencies (see pyproject.toml) installed. MXNet 1.9.1 has packages for Python 3.8 to
# 3.11 and PyTorch 2.13 for 3.10 to 3.14, so each script asks for the Python that its framework runs
# on. The one that the system calls python3 comes first.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Makes $1 the folder of the environment.
use_environment() {
    VENV="$1"
    VENV_PYTHON="$VENV/bin/python"
    # Ours, so that an environment that somebody else has made is never removed.
    _MARK="$VENV/made-by-p3kv"
    # What is completely installed: a key on the first line, the extras on the second.
    _STAMP="$VENV/installed-by-p3kv"
}

use_environment "$REPOSITORY/.venv"

say() { printf '%s\n' "${0##*/}: $*" >&2; }

die() {
    say "$@"
    exit 1
}

# Installs system packages where that needs nobody's leave; says so when it does not work.
install_system_packages() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        return 1
    fi
    say "installing the system packages $* ..."
    apt-get update -qq >/dev/null 2>&1
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" \
        >/dev/null 2>&1
}

# Says in one word whether a Python from 3.$2 to 3.$3 can be used: usable, or what is wrong with it.
_judge_python() {
    # A name may exist without a Python behind it: pyenv's shims, for one.
    "$1" - "$2" "$3" 2>/dev/null <<'PYTHON' || echo "does not run"
import platform, struct, sys
if not (3, int(sys.argv[1])) <= sys.version_info[:2] <= (3, int(sys.argv[2])):
    print("is Python %d.%d" % sys.version_info[:2])
elif (platform.system(), platform.machine(), struct.calcsize("P")) != ("Linux", "x86_64", 8):
    print("is not for 64-bit Linux on x86-64")
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("has no ensurepip (on Debian and Ubuntu: apt-get install python3-venv)")
    else:
        print("usable")
PYTHON
}

# Sets $_BASE_PYTHON to a usable Python from 3.$1 to 3.$2; returns 1, with $_REASONS, without one.
_find_python() {
    local oldest="$1" newest="$2" candidate verdict minor
    local candidates=(python3)
    for ((minor = newest; minor >= oldest; minor--)); do
        candidates+=("python3.$minor")
    done
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    fi
    _REASONS=""
    for candidate in "${candidates[@]}"; do
        if ! command -v "$candidate" >/dev/null; then
            verdict="does not exist"
        else
            verdict="$(_judge_python "$candidate" "$oldest" "$newest")"
        fi
        if [ "$verdict" = usable ]; then
            _BASE_PYTHON="$candidate"
            return
        fi
        _REASONS+=$'\n'"  $candidate $verdict"
    done
    return 1
}

_find_python_for_mxnet() { _find_python 8 11; }

_find_python_for_torch() { _find_python 10 14; }

# What the environment depends on, as one line.
_environment_key() {
    "$_BASE_PYTHON" - "$REPOSITORY/pyproject.toml" <<'PYTHON'
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    digest = hashlib.sha256(file.read()).hexdigest()
# The folder, too: an installation in place is of no use once it has moved.
print(digest, sys.version.split()[0], sys.base_prefix, sys.argv[1])
PYTHON
}

_pip() {
    "$VENV_PYTHON" -m pip --disable-pip-version-check -qq "$@" </dev/null
}

# Runs a command that installs p3kv in place, so that the environment sees every later edit. Two
# would write the same files beside the sources: one waits for the other.
_in_place() {
    (flock 9 && "$@") 9<"$REPOSITORY/setup.py"
}

# Makes sure that the environment has p3kv with the extras $1 ("cpu,experiments"); quick when it has.
# It has MXNet. With "any" as $2 it is made without MXNet where no Python for that is there.
prepare_environment() {
    local extras="$1" newest=11 key stamp_key="" stamp_extras="" extra missing=""
    [ "${2:-}" != any ] || newest=14
    _find_python_for_mxnet || _find_python 8 "$newest" ||
        die "needs Python 3.8 to 3.$newest on Linux x86-64 (set PYTHON to say where it is):$_REASONS"
    key="$(_environment_key)"
    if [ -f "$_STAMP" ]; then
        { read -r stamp_key && read -r stamp_extras; } <"$_STAMP" || true
    fi
    if [ "$stamp_key" != "$key" ]; then
        # Half made, or made for another pyproject.toml or another Python: begin again.
        if [ -e "$VENV" ] && [ ! -e "$_MARK" ]; then
            die "$VENV exists and was not made by this script: move it away"
        fi
        rm -rf "$VENV"
        say "making the environment $VENV with $("$_BASE_PYTHON" --version) ..."
        mkdir -p "$VENV"
        touch "$_MARK"
        "$_BASE_PYTHON" -m venv "$VENV" || die "$_BASE_PYTHON could not make the environment"
        # The first that installs a project without setup.py in place.
        _pip install 'pip>=21.3' || die "pip could not update itself"
        stamp_extras=""
    fi
    for extra in ${extras//,/ }; do
        [[ ",$stamp_extras," == *",$extra,"* ]] || missing=yes
    done
    if [ -n "$missing" ]; then
        rm -f "$_STAMP"
        say "installing p3kv with $extras and what it needs, a minute or two ..."
        _in_place _pip install --editable "$REPOSITORY[$extras]" || die "the installation failed"
        "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info >= (3, 12))' && _check_mxnet
        for extra in ${stamp_extras//,/ }; do
            [[ ",$extras," == *",$extra,"* ]] || extras+=",$extra"
        done
        printf '%s\n' "$key" "$extras" >"$_STAMP"
    fi
}

# Makes $TORCH_PYTHON run p3kv with PyTorch's build for CPUs and what the experiments need, in an
# environment of its own without MXNet; returns 1 where that can't be.
prepare_torch_environment() {
    local key folder="$REPOSITORY/.torch" version=2.13.0 extras=torch,experiments
    TORCH_PYTHON="$folder/bin/python"
    _find_python_for_torch || {
        say "PyTorch $version needs Python 3.10 to 3.14 on Linux x86-64" \
            "(set PYTHON to say where it is):$_REASONS"
        return 1
    }
    key="$(_environment_key) $version $extras"
    [ "$(cat "$folder/installed-by-p3kv" 2>/dev/null)" != "$key" ] || return 0
    if [ -e "$folder" ] && [ ! -e "$folder/made-by-p3kv" ]; then
        say "$folder exists and was not made by this script: move it away"
        return 1
    fi
    rm -rf "$folder"
    say "making the environment $folder with PyTorch $version and $("$_BASE_PYTHON" --version) ..."
    mkdir -p "$folder"
    touch "$folder/made-by-p3kv"
    "$_BASE_PYTHON" -m venv "$folder" || return 1
    _pip_torch 'pip>=21.3' || return 1
    # PyPI has the build for GPUs alone; PyTorch's own index has that for CPUs.
    _pip_torch "torch==$version+cpu" 2>/dev/null ||
        _pip_torch "torch==$version+cpu" --index-url https://download.pytorch.org/whl/cpu \
            2>/dev/null || {
        say "PyTorch's index of builds for CPUs can't be reached: installing PyPI's build," \
            "which brings 5 GB for GPUs ..."
        _pip_torch "torch==$version"
    } || return 1
    _in_place _pip_torch --editable "$REPOSITORY[$extras]" || return 1
    printf '%s\n' "$key" >"$folder/installed-by-p3kv"
}

_pip_torch() {
    "$TORCH_PYTHON" -m pip --disable-pip-version-check -qq install "$@" </dev/null
}

# MXNet's package lacks one library that most systems, but not the smallest, have.
_check_mxnet() {
    local problem
    problem="$("$VENV_PYTHON" -c 'import mxnet' 2>&1 >/dev/null)" && return
    if [[ "$problem" == *libgomp.so.1* ]]; then
        install_system_packages libgomp1 && "$VENV_PYTHON" -c 'import mxnet' && return
        die "MXNet needs the library libgomp.so.1 (on Debian and Ubuntu: apt-get install libgomp1)"
    fi
    die "MXNet does not work here: ${problem##*$'\n'}"
}
