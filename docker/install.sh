#!/bin/sh
# The steps of both images, in the folder with constraints.txt, src and packages. Where there is no container engine they
# work in a virtual environment too:  sh docker/install.sh
#
# WHEELS: where pip finds another build of torch, as PyTorch's installation page has it for CPU and for each CUDA;
# empty for the one that pip takes by itself, with CUDA.
# EXTRAS: as in pyproject.toml.
set -eu

EXTRAS=${EXTRAS:-recipes,tensorboard,hdf5}

install() {
    python -m pip install --no-cache-dir --disable-pip-version-check --root-user-action ignore -c constraints.txt "$@"
}

# torch first, and apart from the rest: it is by far the largest part.
if [ -n "${WHEELS-}" ]; then export PIP_EXTRA_INDEX_URL="$WHEELS"; fi
install setuptools torch
install --no-build-isolation ./packages/*/ ".[$EXTRAS]"

stepladder --version
python -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
