#!/usr/bin/env bash
# What this project's tests and benchmarks say on a machine with a CUDA GPU, in one page and under ten minutes:
#
#     benchmarks/on_gpu.sh              writes docs/on_gpu.md, to be sent in a pull request
#
# It uses the Python of $PYTHON, or else the environment .venv, which it makes if there is none. JAX's part is
# left out where JAX has no GPU: install jax[cuda12] first. What fails is named on the page and does not stop
# the rest; the exit status is then 1.
#
#     benchmarks/on_gpu.sh --device cpu --quick     tries the script itself, and writes build/on_gpu.md
set -uo pipefail
cd "$(dirname "$0")/.."

device=cuda quick=
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=${2:?--device cuda, or cpu}; shift 2 ;;
        --quick) quick=--quick; shift ;;
        *) echo "Write benchmarks/on_gpu.sh [--device cuda] [--quick]." >&2; exit 2 ;;
    esac
done
page=docs/on_gpu.md
[ "$device" = cuda ] && [ -z "$quick" ] || page=build/on_gpu.md
logs=build/on_gpu
rm -rf "$logs" && mkdir -p "$logs"

if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    if [ ! -x "$PYTHON" ]; then
        newest=$(for one in python3.13 python3.12 python3.11; do command -v "$one" && break; done)
        "${newest:?Python 3.11 or later is needed}" -m venv .venv || exit
        "$PYTHON" -m pip install --quiet --upgrade 'pip>=25.1' || exit
        "$PYTHON" -m pip install --quiet --editable '.[torch]' pytest pytest-xdist hypothesis sybil numpy || exit
    fi
fi
if [ "$device" = cuda ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "PyTorch in $PYTHON sees no CUDA device. Install PyTorch's CUDA build there, or name another Python" >&2
    echo "in PYTHON." >&2
    exit 2
fi

broke=()
names=() outcomes=() seconds=()
step() { # step NAME SECONDS COMMAND...: run it for at most so long, and keep its last line
    local name=$1 most=$2 log=$logs/${#names[@]}.log began=$SECONDS
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$most" "$@" >"$log" 2>&1
    local status=$?
    local last
    last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | tr '|' '/' | tr -d '=' | cut -c -100)
    [ $status -eq 124 ] && last="not done after $most s"
    names+=("$name") outcomes+=("$last") seconds+=("$((SECONDS - began))")
    echo "   $last"
    [ $status -eq 0 ] || [ $status -eq 5 ] || broke+=("$name") # 5: nothing but skips
}
has() { "$PYTHON" -c "import $1" 2>/dev/null; }
tests=("$PYTHON" -m pytest -q -p no:cacheprovider)

# These compute on the GPU.
step "training on $device beside training on the CPU" 90 \
    env PREAMP_TEST_DEVICE="$device" "${tests[@]}" tests/device_checks.py
step "CUDA graphs, and NCCL with one rank" 90 "${tests[@]}" tests/test_torch_cuda.py
# The rest of the tests compute on the CPU, those for JAX on the GPU if it has one. None of them may mind a GPU.
of_torch=() # without the two above, and without what needs packages that are not there
for file in tests/test_torch_*.py; do
    case $file in
        *_cuda.py | *_devices.py) ;;
        *_integrations.py) if has lightning && has accelerate && has transformers; then of_torch+=("$file"); fi ;;
        *) of_torch+=("$file") ;;
    esac
done
of_jax=(tests/jax)
if [ -n "$quick" ]; then
    of_torch=(tests/test_torch_one_rank.py) of_jax=(--collect-only tests/jax)
else
    workers=$("$PYTHON" -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')
    tests+=(--continue-on-collection-errors -n "$workers" --dist loadfile)
fi
step "tests for PyTorch" 150 "${tests[@]}" "${of_torch[@]}"
if has jax; then step "tests for JAX" 100 "${tests[@]}" "${of_jax[@]}"; fi
table=$logs/benchmarks.md
step "benchmarks" 150 "$PYTHON" benchmarks/run.py --device "$device" --only torch_scaler $quick --page "$table"

mkdir -p "$(dirname "$page")"
{
    echo "# On a GPU"
    echo
    echo "\`benchmarks/on_gpu.sh\` writes this page; nothing in it is written by hand."
    [ -z "$quick" ] || printf '\n**It was made with `--quick`: to try the script. These are not measurements.**\n'
    echo
    "$PYTHON" - "$device" <<'PYTHON'
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
    print(f"- Device: {found.name}, {memory}; driver {driver}, CUDA {torch.version.cuda}.")
else:
    print("- Device: the CPU.")
try:
    import jax
except ImportError:
    print("- JAX: not installed.")
else:
    print(f"- JAX {jax.__version__} on {jax.devices()[0].device_kind}.")
PYTHON
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
        sed -n '/^## All rows/,$p' "$table"
    fi
} >"$page"
echo "$SECONDS seconds: $page"
[ ${#broke[@]} -eq 0 ]
