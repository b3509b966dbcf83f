#!/usr/bin/env bash
# make wheels: bash packages/check_wheels.sh .venv/bin/python
#
# Builds the wheels of this repository. Installs that of slurm-lab into an empty environment, and runs its own tests
# there; that of stepladder-exchange beside torch and what torch requires, which numpy is no part of. Then lets pip
# install stepladder, with the other two from the folder of wheels, into an environment that has the other packages
# which stepladder requires, and nothing of this repository.
set -euo pipefail
python=$(realpath --no-symlinks "$1")
cd "$(dirname "$0")/.."
unset PYTHONPATH  # it would show the checkout to the environments
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod a+rx "$folder"  # a test of slurm-lab is another user's
pip=("$python" -m pip --disable-pip-version-check)

# Makes an environment without pip, named by the first word, that sees the folder of packages in the second one.
make_environment() {
    "$python" -m venv --without-pip "$folder/$1"
    mkdir -p "$2"
    echo "$2" > "$("$folder/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
}

# Runs the tests of the package in the first word in the environment of the second one.
test_alone() {
    (cd "$folder/source/packages/$1" && rm -r src && "$folder/$2/bin/python" -m pytest)
}

# A build in the checkout would leave files there.
mkdir "$folder/source"
cp -r src lessons docs packages pyproject.toml setup.py MANIFEST.in README.md LICENSE "$folder/source"
"${pip[@]}" -q wheel --no-deps --no-build-isolation -w "$folder/wheels" "$folder/source" "$folder"/source/packages/*/
ls "$folder/wheels"

"$python" -m venv --without-pip "$folder/lab"
"${pip[@]}" -q --python "$folder/lab" install -c constraints.txt "$folder"/wheels/slurm_lab-*.whl pytest
test_alone slurm-lab lab

# torch is too large to be installed once more.
make_environment exchange "$folder/torch/site-packages"
"$python" - "$folder/torch/site-packages" << 'END'
import re, sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

folder = Path(sys.argv[1])
names = ["torch"]
for name in names:
    try:
        package = distribution(name)
    except PackageNotFoundError:
        continue  # of another system
    needed = [line for line in package.requires or () if "extra ==" not in line]
    names += [n for n in (re.match(r"[\w.-]+", line)[0] for line in needed) if n not in names]
    for entry in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        if not (folder / entry).exists():
            (folder / entry).symlink_to(package.locate_file(entry))
END
"${pip[@]}" -q --python "$folder/exchange" install -c constraints.txt "$folder"/wheels/stepladder_exchange-*.whl pytest
if "$folder/exchange/bin/python" -c 'import numpy' 2> /dev/null; then
    exit 1  # the tests would not show that it is not needed
fi
test_alone stepladder-exchange exchange

make_environment both "$folder/others"
others=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for path in "$others"/*; do
    case ${path##*/} in
        *stepladder* | *slurm_lab*) ;;
        *) ln -s "$path" "$folder/others" ;;
    esac
done
"${pip[@]}" -q --python "$folder/both" install --no-index -f "$folder/wheels" stepladder
cd /
if message=$(XDG_STATE_HOME="$folder/state" "$folder/both/bin/stepladder" lab status 2>&1); then
    exit 1  # there is no lab
fi
[[ $message == *"no lab is up"*"HINT: stepladder lab up"* ]]
"$folder/both/bin/slurm-lab" --version
cat > "$folder/script.py" << 'END'
import torch
torch.distributed.init_process_group("gloo")
torch.distributed.all_reduce(torch.ones(1))
END
message=$(XDG_STATE_HOME="$folder/state" "$folder/both/bin/stepladder" run --nproc 2 "$folder/script.py" 2>&1)
[[ $message == *"the ranks exchange tensors in shared memory"* ]]
