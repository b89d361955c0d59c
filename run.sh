#!/usr/bin/env bash
# Front door: ./run.sh COMMAND [more arguments for Snakemake]. `./run.sh help` lists the commands.
set -euo pipefail

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
VENV="$HERE/.venv"
DISK_NEEDED_GB=8

usage() {
    cat <<'TEXT'
./run.sh COMMAND [OPTIONS]

  install          make .venv and install the pinned environment (every other command does it if needed)
  data             fetch the dataset builder, build and check the data
  train-ARM        train one arm: train-odb, train-standard
  eval-ARM         validation loss and MMMU-MC of one arm: eval-odb, eval-standard
  eval-valloss     validation loss of one checkpoint: ODB_ACCEL_EVAL_CHECKPOINT, by default the ODB arm's
  benchmark        MMMU-MC of one checkpoint: ODB_ACCEL_EVAL_CHECKPOINT, by default the ODB arm's
  all-ARM          data, training and both evaluations of one arm: all-odb, all-standard
  all              every arm, both evaluations, the comparison
  report           the comparison from the results that are there; never trains
  inspect          some samples of each source as the model sees them
  prefetch         fetch builder, model and benchmark now, so that everything after it runs offline
  status           what is finished, with which settings and code
  provenance       where each result comes from (--json: whole records)
  dag              the graph of the rules (mermaid)
  test             the test suite
  help             this text

Options after the command go to Snakemake, for example: -n (show what would run), --cores 4,
--configfile config/batching-study.yaml, --config 'training={lr: 2e-5}', --workflow-profile profiles/slurm.
  --recorded       evaluate with the settings recorded beside the finished training
  --retrain        train again where the settings differ from the recorded ones

ODB_MM_MIX_MODEL=MODEL selects the real preset (config/qwen3vl-2b.yaml); config/README.md lists all variables.
PYTHON=INTERPRETER uses that environment as it is, without .venv.
TEXT
}

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

supported() { # is "$1" a Python 3.11 or 3.12 that starts?
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

find_python() {
    local name
    for name in python3.12 python3.11 python3 python; do
        if command -v "$name" >/dev/null && supported "$name" && "$name" -c 'import venv, ensurepip' >/dev/null 2>&1; then
            printf '%s' "$name"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 with its venv module found" \
        "install one (Debian: apt-get install python3.11-venv), or name an environment with PYTHON=/path/to/python"
}

stamp_of() { # what was installed: the content of the given files
    cat "$@" | sha256sum | cut -d' ' -f1
}

install_into_venv() { # install_into_venv STAMP FILE...
    local stamp="$VENV/.installed-$1" name="$1" wanted arguments=() file
    shift
    wanted="$(stamp_of "$HERE/envs/constraints.txt" "$@")"
    if [[ -x "$VENV/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
        return
    fi
    for file in "$@"; do arguments+=(-r "$file"); done
    if [[ ! -x "$VENV/bin/python" ]] || ! supported "$VENV/bin/python"; then
        [[ -w "$HERE" ]] || fail "cannot write to $HERE, so no .venv can be made there" \
            "name an environment with PYTHON=/path/to/python and outputs with --directory DIR"
        local python free_kb
        python="$(find_python)"
        free_kb="$(df -Pk "$HERE" | awk 'NR == 2 {print $4}')"
        if ((free_kb < DISK_NEEDED_GB * 1000 * 1000)); then
            fail "$((free_kb / 1000000)) GB are free in $HERE, the environment needs about $DISK_NEEDED_GB GB"
        fi
        echo "Making .venv with $("$python" --version) (once: 3 to 10 minutes, about 7 GB on disk)" >&2
        rm -rf "$VENV"
        "$python" -m venv "$VENV"
    else
        echo "Completing .venv ($name)" >&2
    fi
    # pip takes what is already there, so an interrupted installation goes on where it stopped.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$HERE/envs/constraints.txt" "${arguments[@]}" >&2 ||
        fail "the installation did not finish; the messages above say why" \
            "the same command goes on where it stopped"
    printf '%s' "$wanted" >"$stamp"
    echo "Environment ready: $VENV" >&2
}

use_environment() { # sets PYTHON_PROGRAM; "$1" is test or run
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program"
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or 3.12: $("$PYTHON" --version 2>&1)"
        "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("snakemake") is None)' ||
            fail "PYTHON=$PYTHON has no Snakemake" "install envs/requirements.txt into it"
        PYTHON_PROGRAM="$(command -v "$PYTHON")"
    else
        install_into_venv run "$HERE/envs/requirements.txt"
        if [[ "$1" == test ]]; then
            install_into_venv test "$HERE/envs/requirements.txt" "$HERE/envs/requirements-dev.txt"
        fi
        PYTHON_PROGRAM="$VENV/bin/python"
        export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
    fi
}

gpu_count() { # devices that are visible, without starting CUDA
    local named
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        named="${CUDA_VISIBLE_DEVICES//[[:space:]]/}"
        [[ -z "$named" || "$named" == -* ]] && echo 0 || tr ',' '\n' <<<"$named" | grep -c .
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c '^[0-9]' || true
    else
        echo 0
    fi
}

given() { # given "NAMES" ARGUMENTS: is one of the options among the arguments?
    local names=" $1 " argument
    shift
    for argument in "$@"; do
        [[ "$names" == *" ${argument%%=*} "* ]] && return 0
    done
    return 1
}

check_configfiles() { # every file after --configfile is there; Snakemake would end with a traceback
    local argument taking=""
    for argument in "$@"; do
        case "$argument" in
        --configfile | --configfiles) taking=1 && continue ;;
        --configfile=* | --configfiles=*) taking=1 && argument="${argument#*=}" ;;
        -*) taking="" ;;
        esac
        [[ -z "$taking" || -f "$argument" ]] ||
            fail "there is no config file $argument" "give a path from $PWD; presets are in config/"
    done
}

snakemake_run() { # snakemake_run TARGET ARGUMENTS...
    local target="$1" before=()
    shift
    check_configfiles "$@"
    given "-c --cores -j --jobs --workflow-profile --profile --executor" "$@" || before+=(--cores all)
    given "--resources --res --workflow-profile --profile --executor" "$@" || before+=(--resources "gpu=$(gpu_count)")
    exec "$PYTHON_PROGRAM" -m snakemake --snakefile "$HERE/Snakefile" "$target" "${before[@]}" "$@"
}

main() {
    local command="${1:-help}" guard="" arguments=() argument
    (($#)) && shift
    case "$command" in
    help | -h | --help)
        usage
        return
        ;;
    esac
    for argument in "$@"; do
        case "$argument" in
        --recorded) guard=recorded ;;
        --retrain) guard=retrain ;;
        *) arguments+=("$argument") ;;
        esac
    done
    set -- ${arguments[@]+"${arguments[@]}"}
    cd -- "$HERE"
    case "$command" in
    install)
        use_environment run
        ;;
    test)
        use_environment test
        # Two at a time: a good part of the suite waits, for SLURM above all, whose tests therefore start early.
        (($#)) || set -- -n 2 --no-loadscope-reorder tests
        exec "$PYTHON_PROGRAM" -m pytest "$@"
        ;;
    status | provenance)
        use_environment run
        exec "$PYTHON_PROGRAM" "$HERE/workflow_scripts/run_status.py" "$command" "$@"
        ;;
    dag)
        use_environment run
        exec "$PYTHON_PROGRAM" -m snakemake --snakefile "$HERE/Snakefile" --rulegraph mermaid-js "$@" all
        ;;
    eval-* | benchmark | report | inspect)
        # These never train over a finished checkpoint because of a forgotten variable.
        export ODB_WORKFLOW_GUARD="${guard:-stop}"
        use_environment run
        snakemake_run "${command//-/_}" "$@"
        ;;
    data | prefetch | comparison | all | all-* | train-*)
        [[ -n "$guard" ]] && export ODB_WORKFLOW_GUARD="$guard"
        use_environment run
        snakemake_run "${command//-/_}" "$@"
        ;;
    *)
        echo "error: no command '$command'" >&2
        usage >&2
        return 2
        ;;
    esac
}

main "$@"
