#!/usr/bin/env bash
# Write each template anew, by the command in its second line: bash slurm/regenerate.sh
set -euo pipefail
cd "$(dirname "$0")"
for file in *.sbatch; do
    eval "$(sed -n 's/^# Made by: //p' "$file")" > "$file.new"
    mv "$file.new" "$file"
done
