#!/usr/bin/env bash
# Runs the tests; their exit code is the last step's, so that the report is kept and told before.
set -uo pipefail

report="$RUNNER_TEMP/gpumem-$GPUMEM_NAME/gpumem.json"
mkdir -p "$(dirname "$report")"
rm -f "$report"
export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} --gpumem-report='json:$report'"

# As GitHub runs a step: a failure of any line, or before a pipe, is one.
bash --noprofile --norc -eo pipefail -c "$GPUMEM_RUN"
code=$?

printf 'report=%s\ncode=%s\n' "$report" "$code" >>"$GITHUB_OUTPUT"
