"""stepladder run --nproc 2 early_stopping.py: train until the accuracy has stopped improving.

Each call of `fit` resumes the run and trains one epoch more, so a kill at any time loses nothing.
"""

from dataclasses import replace
from pathlib import Path

from digits_job import Config, build
from stepladder import Recipe, Settings, Trainer, process_group

RUN_DIR = Path("runs/early")
PATIENCE, MAX_EPOCHS = 3, 30  # epochs

with process_group():  # one group of ranks for all calls of fit
    for epochs in range(1, MAX_EPOCHS + 1):
        config = Config(lr=0.2, epochs=epochs)
        job = replace(build(config), best=("accuracy", "max"))
        result = Trainer(job, Settings(RUN_DIR), Recipe("digits_job", config)).fit()
        steps_per_epoch = result.steps // epochs
        if result.steps - result.best.step >= PATIENCE * steps_per_epoch:
            break
print("stopped after epoch", epochs, "with the best accuracy", result.best.value)
