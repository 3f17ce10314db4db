#!/usr/bin/env bash
# Sets everything up and passes the tests; the model tests run on the oldest supported transformers too.
# Arguments go to pytest's first run, for example: bash launch/test.sh -k forest
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

oldest=5.17.0
old="$venv/transformers-$oldest"
if [[ ! -d "$old" ]]; then
    echo "test: installing transformers $oldest beside the newest one"
    rm -rf "$old.part"
    # It wants an older hub client, which speaks through httpx; the rest it shares with the environment.
    "$python" -m pip install --quiet --no-deps --target "$old.part" "transformers==$oldest" "huggingface-hub<2"
    "$python" -m pip install --quiet --target "$old.part" httpx
    mv "$old.part" "$old"
fi

echo "test: the whole suite"
"$python" -m pytest --timeout 600 --durations 10 "$@"

echo "test: the model tests on transformers $oldest"
export PYTHONPATH="$old${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c "import transformers as t; assert t.__version__ == '$oldest', t.__version__"
"$python" -m pytest --timeout 600 tests/models
