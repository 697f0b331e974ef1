# Gives a script its Python environment: .venv in the repository, unless it asks for another one
# with `use_environment FOLDER`. To be sourced by bash scripts.
#
# After `prepare_environment EXTRAS`, $VENV_PYTHON runs p3kv from this repository, with the named
# optional dependencies (see pyproject.toml) installed.

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

# Says in one word whether a Python can be used: usable, or what is wrong with it.
_judge_python() {
    # A name may exist without a Python behind it: pyenv's shims, for one.
    "$1" - 2>/dev/null <<'PYTHON' || echo "does not run"
import platform, struct, sys
if not (3, 8) <= sys.version_info[:2] <= (3, 11):
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

# Sets $_BASE_PYTHON to a Python that MXNet 1.9.1 has a package for.
_find_python() {
    local candidate verdict reasons=""
    local candidates=(python3 python3.11 python3.10 python3.9 python3.8)
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        if ! command -v "$candidate" >/dev/null; then
            verdict="does not exist"
        else
            verdict="$(_judge_python "$candidate")"
        fi
        if [ "$verdict" = usable ]; then
            _BASE_PYTHON="$candidate"
            return
        fi
        reasons+=$'\n'"  $candidate $verdict"
    done
    die "needs Python 3.8 to 3.11 on Linux x86-64 (set PYTHON to say where it is):$reasons"
}

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
prepare_environment() {
    local extras="$1" key stamp_key="" stamp_extras="" extra missing=""
    _find_python
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
        say "installing p3kv with $extras: MXNet and what else it needs, a minute or two ..."
        _in_place _pip install --editable "$REPOSITORY[$extras]" || die "the installation failed"
        _check_mxnet
        for extra in ${stamp_extras//,/ }; do
            [[ ",$extras," == *",$extra,"* ]] || extras+=",$extra"
        done
        printf '%s\n' "$key" "$extras" >"$_STAMP"
    fi
}

# Makes $TORCH_PYTHON run p3kv with PyTorch's build for CPUs, in an environment of its own without
# MXNet; returns 1 where that can't be.
prepare_torch_environment() {
    local key folder="$REPOSITORY/.torch" version=2.13.0+cpu
    TORCH_PYTHON="$folder/bin/python"
    _find_python
    key="$(_environment_key) $version"
    [ "$(cat "$folder/installed-by-p3kv" 2>/dev/null)" != "$key" ] || return 0
    if [ -e "$folder" ] && [ ! -e "$folder/made-by-p3kv" ]; then
        say "$folder exists and was not made by this script: move it away"
        return 1
    fi
    rm -rf "$folder"
    say "making the environment $folder with PyTorch $version ..."
    mkdir -p "$folder"
    touch "$folder/made-by-p3kv"
    "$_BASE_PYTHON" -m venv "$folder" || return 1
    _pip_torch 'pip>=21.3' || return 1
    # PyPI has the build for GPUs alone, which is large; PyTorch's own index has that for CPUs.
    _pip_torch "torch==$version" 2>/dev/null ||
        _pip_torch "torch==$version" --index-url https://download.pytorch.org/whl/cpu || return 1
    _in_place _pip_torch --editable "$REPOSITORY[torch]" || return 1
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
