#!/usr/bin/env bash
# make wheels: bash packages/check_wheels.sh .venv/bin/python
#
# Builds the wheels of this repository. Installs that of slurm-lab into an empty environment, and runs its own tests
# there. Then lets pip install stepladder, with slurm-lab from the folder of wheels, into an environment that has the
# other packages which stepladder requires, and nothing of this repository.
set -euo pipefail
python=$(realpath --no-symlinks "$1")
cd "$(dirname "$0")/.."
unset PYTHONPATH  # it would show the checkout to the environments
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod a+rx "$folder"  # a test of slurm-lab is another user's
pip=("$python" -m pip --disable-pip-version-check)

# A build in the checkout would leave files there.
mkdir "$folder/source"
cp -r src lessons docs packages pyproject.toml setup.py MANIFEST.in README.md LICENSE "$folder/source"
"${pip[@]}" -q wheel --no-deps --no-build-isolation -w "$folder/wheels" \
    "$folder/source" "$folder/source/packages/slurm-lab"
ls "$folder/wheels"

"$python" -m venv --without-pip "$folder/alone"
"${pip[@]}" -q --python "$folder/alone" install -c constraints.txt "$folder"/wheels/slurm_lab-*.whl pytest
(cd "$folder/source/packages/slurm-lab" && rm -r src && "$folder/alone/bin/python" -m pytest)

"$python" -m venv --without-pip "$folder/both"
site=$("$folder/both/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
others=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$folder/others"
for path in "$others"/*; do
    case ${path##*/} in
        *stepladder* | *slurm_lab*) ;;
        *) ln -s "$path" "$folder/others" ;;
    esac
done
echo "$folder/others" > "$site/others.pth"
"${pip[@]}" -q --python "$folder/both" install --no-index -f "$folder/wheels" stepladder
cd /
if message=$(XDG_STATE_HOME="$folder/state" "$folder/both/bin/stepladder" lab status 2>&1); then
    exit 1  # there is no lab
fi
[[ $message == *"no lab is up"*"HINT: stepladder lab up"* ]]
"$folder/both/bin/slurm-lab" --version
