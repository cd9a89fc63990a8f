#!/bin/sh
# environment.sh EXTRA [--over-base]: /opt/omni/env, the Python packages of one extra of pyproject.toml.
#
# Taken from the first of these in the build context:
#   environment/   a prepared environment (`omni image build` makes one); copied
#   wheelhouse/    wheels, complete (`omni image wheelhouse EXTRA`); installed without any index: air-gapped builds
#   otherwise      the package index that pip is configured for (PIP_INDEX_URL as a build argument)
#
# --over-base: the base image brings torch and the engine for its accelerator; they are kept, only what is
# missing is added.
set -eu
extra=$1
mode=${2:-}
context=${CONTEXT:-/context}
env=/opt/omni/env
marker=$env/omni-environment
if [ -e "$marker" ]; then
    echo "environment of the base image: $(cat "$marker")"
    exit 0
fi
python=$(command -v python3.11 || command -v python3)
mkdir -p /opt/omni/app

if [ -d "$context/environment" ]; then
    cp -R "$context/environment" "$env"
else
    [ "$mode" = --over-base ] || sh "$context/runtime_image/install/system.sh" python3.11-venv
    if [ "$mode" = --over-base ]; then
        "$python" -m venv --system-site-packages "$env"
    else
        "$python" -m venv "$env"
    fi
    if [ -d "$context/wheelhouse" ]; then
        "$env/bin/python" -m pip install -q --no-index --no-deps --no-compile "$context"/wheelhouse/*.whl
    else
        requirements=$(mktemp)
        "$python" "$context/runtime_image/install/requirements.py" "$context/pyproject.toml" "$extra" >"$requirements"
        if [ "$mode" = --over-base ]; then
            # What the base has is a constraint, so that its torch and engine are never replaced.
            "$env/bin/python" -m pip freeze --all 2>/dev/null | grep -E '^[A-Za-z0-9._-]+==' >"$requirements.base" || true
            "$env/bin/python" -m pip install -q --no-compile -r "$requirements" -c "$requirements.base"
        else
            "$python" -m venv /tmp/uv
            /tmp/uv/bin/pip install -q uv
            /tmp/uv/bin/uv pip install -q --no-cache --python "$env/bin/python" -r "$requirements" \
                -c "$context/constraints.txt" --override "$context/scripts/overrides.txt"
            rm -rf /tmp/uv
        fi
        rm -f "$requirements" "$requirements.base"
    fi
    if [ "$mode" != --over-base ]; then
        # pip is a tool of the build; nothing is installed into a running container.
        "$env/bin/python" -m pip uninstall -q -y pip
        apt-get purge -y -q python3.11-venv python3-pip-whl python3-setuptools-whl
    fi
fi
# The root file system is read-only at run time, so what is not compiled now is compiled at every start.
# Some packages carry templates that are no valid Python; they are the reason for `|| true`.
"$env/bin/python" -m compileall -q -q -j 0 --invalidation-mode unchecked-hash "$env/lib" || true
packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo /opt/omni/app >"$packages/omni.pth"
echo "$extra" >"$marker"
rm -rf "${HOME:-/nonexistent}/.cache"
