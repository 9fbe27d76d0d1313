#!/usr/bin/env bash
# Tells the pull request what changed since its base branch: one comment, updated from then on.
set -euo pipefail

if [ ! -f "$GPUMEM_REPORT" ]; then
    echo "::warning::pytest-gpumem: the tests wrote no report, so there is nothing to comment on"
    exit 0
fi
folder="$(dirname "$GPUMEM_REPORT")"
comment="$folder/comment.md"
base="$folder/base"
rm -rf "$base"

# The report of the base branch's newest run that has one. Runs of pushes alone: that of a fork's
# pull request may have a branch of the same name.
workflow="${GITHUB_WORKFLOW_REF%%@*}"
runs="$(gh run list --repo "$GITHUB_REPOSITORY" --workflow "${workflow##*/}" --limit 20 \
    --branch "$GITHUB_BASE_REF" --event push --status completed \
    --json databaseId --jq '.[].databaseId')" || runs=""
for run in $runs; do
    gh run download "$run" --repo "$GITHUB_REPOSITORY" --name "$GPUMEM_NAME" --dir "$base" \
        2>/dev/null && break
done

against=()
if [ -f "$base/gpumem.json" ]; then
    against=(--against "$base/gpumem.json" --base-name "$GITHUB_BASE_REF")
fi
name="$GPUMEM_NAME"
[ "$name" = gpumem ] && name=""
gpumem report "$GPUMEM_REPORT" --to markdown ${against[@]+"${against[@]}"} --name "$name" --output "$comment"

read -r marker <"$comment"
mine="[.comments[] | select(.viewerDidAuthor and (.body | startswith(\"$marker\")))][0].url // \"\""
if url="$(gh pr view "$GPUMEM_PULL" --repo "$GITHUB_REPOSITORY" --json comments --jq "$mine")"; then
    if [ -n "$url" ]; then
        gh api --silent --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/${url##*-}" \
            -F "body=@$comment" && exit 0
    else
        gh pr comment "$GPUMEM_PULL" --repo "$GITHUB_REPOSITORY" --body-file "$comment" && exit 0
    fi
fi
# The token of a fork's pull request may only read; the summary of the step says the same.
echo "::warning::pytest-gpumem: the pull request could not be commented on; see the step's summary"
