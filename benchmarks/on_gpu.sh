#!/usr/bin/env bash
# What this project's tests and benchmarks say on a machine with a CUDA GPU, in one page. It takes under ten minutes once
# everything is installed:
#
#     benchmarks/on_gpu.sh              writes docs/on_gpu.md, to be sent in a pull request
#
# It uses the Python of $PYTHON, which has to have what the tests need, or else the environment .venv, into which it
# installs that. JAX's part runs where JAX is installed and has a GPU: install jax[cuda12], optax, flax and equinox first.
# What fails is named on the page and does not stop the rest; the exit status is then 1.
#
#     benchmarks/on_gpu.sh --device cpu --quick     tries the script itself, and writes build/on_gpu.md
set -uo pipefail
cd "$(dirname "$0")/.."

device=cuda quick=
while [ $# -gt 0 ]; do
    case $1/${2:-} in
        --device/cuda | --device/cpu) device=$2; shift 2 ;;
        --quick/*) quick=--quick; shift ;;
        *) echo "Write benchmarks/on_gpu.sh [--device cuda] [--quick], or --device cpu to try the script." >&2; exit 2 ;;
    esac
done
page=docs/on_gpu.md
[ "$device" = cuda ] && [ -z "$quick" ] || page=build/on_gpu.md
logs=build/on_gpu
rm -rf "$logs" && mkdir -p "$logs"

lacks() { # lacks MODULE...: print those that cannot be found
    "$PYTHON" -c 'import importlib.util as i, sys; print(*(n for n in sys.argv[1:] if not i.find_spec(n)))' "$@"
}
needed=(preamp torch numpy pytest xdist hypothesis sybil sklearn)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    make --no-print-directory .venv/bin/python || exit
    if [ -n "$(lacks "${needed[@]}")" ]; then
        "$PYTHON" -m pip install --quiet --upgrade 'pip>=25.1' || exit
        "$PYTHON" -m pip install --quiet --editable '.[torch,lab]' pytest pytest-xdist hypothesis sybil || exit
    fi
fi
missing=$(lacks "${needed[@]}") || exit
if [ -n "$missing" ]; then
    echo "$PYTHON lacks: $missing. Install them there, or leave PYTHON out: then .venv is used." >&2
    exit 2
fi
if [ "$device" = cuda ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "PyTorch in $PYTHON sees no CUDA device. Install PyTorch's CUDA build there, or name another Python" >&2
    echo "in PYTHON." >&2
    exit 2
fi
export XLA_PYTHON_CLIENT_PREALLOCATE=false # or each of JAX's processes takes most of the GPU's memory

broke=()
names=() outcomes=() seconds=()
step() { # step NAME SECONDS COMMAND...: run it for at most so long, and keep its last line
    local name=$1 most=$2 log=$logs/${#names[@]}.log began=$SECONDS
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$most" "$@" >"$log" 2>&1
    local status=$?
    local last
    last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | tr '|' '/' | tr -d '=' | sed 's/^ *//; s/ *$//' | cut -c -100)
    case $status in 124 | 137) last="not done after $most s" ;; esac
    names+=("$name") outcomes+=("$last") seconds+=("$((SECONDS - began))")
    echo "   $last"
    [ $status -eq 0 ] || [ $status -eq 5 ] || broke+=("$name") # 5: nothing but skips
}
tests=("$PYTHON" -m pytest -q -p no:cacheprovider -p no:benchmark) # pytest-benchmark warns beside xdist

# These compute on the GPU.
step "training on $device beside training on the CPU" 120 \
    env PREAMP_TEST_DEVICE="$device" "${tests[@]}" tests/torch/device_checks.py
step "CUDA graphs, and NCCL with one rank" 60 "${tests[@]}" tests/torch/test_cuda.py
# The rest of PyTorch's tests compute on the CPU, JAX's on the GPU. None of them may mind a GPU.
of_torch=() # without the two above, and without what needs packages that are not there
for file in tests/torch/test_*.py; do
    case $file in
        *_cuda.py | *_devices.py) ;;
        *_integrations.py) [ -n "$(lacks lightning accelerate transformers)" ] || of_torch+=("$file") ;;
        *) of_torch+=("$file") ;;
    esac
done
of_jax=(tests/jax)
if [ -n "$quick" ]; then
    of_torch=(tests/torch/test_one_rank.py) of_jax=(--collect-only tests/jax)
else
    workers=$("$PYTHON" -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')
    tests+=(--continue-on-collection-errors -n "$workers" --dist loadfile)
fi
step "tests for PyTorch" 150 "${tests[@]}" "${of_torch[@]}"
jax="not installed, or without optax, flax or equinox"
if [ -z "$(lacks jax optax flax equinox)" ]; then
    jax=$("$PYTHON" -c 'import jax; print(f"{jax.__version__} on {jax.devices()[0].device_kind}")' 2>"$logs/jax.log")
    if [ "$device" = cpu ] || "$PYTHON" -c 'import sys, jax; sys.exit(jax.default_backend() != "gpu")'; then
        step "tests for JAX" 100 "${tests[@]}" "${of_jax[@]}"
    fi
fi
table=$logs/benchmarks.md
step "benchmarks" 150 "$PYTHON" benchmarks/run.py --device "$device" --only torch_scaler $quick --page "$table"

about=$("$PYTHON" - "$device" <<'PYTHON'
import datetime
import platform
import subprocess
import sys

import torch

print(f"- {datetime.date.today().isoformat()}, Python {platform.python_version()}, torch {torch.__version__}.")
if sys.argv[1] == "cuda":
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    found = torch.cuda.get_device_properties(0)
    memory = f"{found.total_memory / 2**30:.0f} GiB"
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    print(f"- Device: {found.name}, {memory}; driver {driver}, {runtime}.")
else:
    print("- Device: the CPU.")
PYTHON
) || exit
mkdir -p "$(dirname "$page")"
{
    printf -- '---\norphan: true\n---\n\n' # until a page of docs/ leads here
    echo "# On a GPU"
    echo
    echo "\`benchmarks/on_gpu.sh\` writes this page; nothing in it is written by hand."
    [ -z "$quick" ] || printf '\n**It was made with `--quick`: to try the script. These are not measurements.**\n'
    echo
    echo "$about"
    echo "- JAX: $jax."
    echo
    echo "| what | outcome | seconds |"
    echo "| --- | --- | ---: |"
    for one in "${!names[@]}"; do echo "| ${names[$one]} | ${outcomes[$one]} | ${seconds[$one]} |"; done
    echo
    echo "## What broke"
    echo
    if [ ${#broke[@]} -eq 0 ]; then
        echo "Nothing."
    else
        for one in "${broke[@]}"; do echo "- $one"; done
        echo
        echo '```text'
        grep -h -E '^(FAILED|ERROR) ' "$logs"/*.log | cut -c -160 | head -n 40
        echo '```'
    fi
    if [ -e "$table" ]; then
        echo
        sed -n '/^## /,$p' "$table"
    fi
} >"$page"
echo "$SECONDS seconds: $page"
[ ${#broke[@]} -eq 0 ]
