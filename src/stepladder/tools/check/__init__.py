"""Silent mistakes of distributed training, found in any script: `stepladder check`."""
